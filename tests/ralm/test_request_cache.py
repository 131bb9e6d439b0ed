from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_refspec.index.retrieved import Retrieved
from hf_refspec.ralm import request_cache
from hf_refspec.ralm.checked_search import CheckedRetriever
from hf_refspec.ralm.request_cache import RequestCache

SCORES = np.random.default_rng(0).integers(0, 5, 60).astype(np.float32)  # many are the same


class Scored:
    def score(self, query, ids):
        return SCORES[ids] * query


@pytest.fixture(scope="module")
def retriever():
    with CheckedRetriever(Scored(), k=1, timeout=None) as retriever:
        yield retriever


def held_by_hand(additions: list[list[int]], most: int) -> dict[int, int]:
    """Ids and the ranks that they came with: the twin of what is added."""
    ranks: dict[int, int] = {}
    last_added: dict[int, int] = {}
    for number, ids in enumerate(additions):
        for rank, passage_id in enumerate(ids):
            ranks.setdefault(passage_id, rank)
            last_added[passage_id] = number
        kept = sorted(ranks, key=lambda i: (-last_added[i], i))[:most]
        ranks = {i: ranks[i] for i in kept}
        last_added = {i: last_added[i] for i in kept}
    return ranks


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 59), min_size=1, max_size=12), min_size=1, max_size=8),
    st.integers(3, 80),
    st.integers(1, 10),
)
def test_it_holds_what_was_added_last_and_finds_the_best_of_that(
    monkeypatch, retriever, additions, most, k
):
    monkeypatch.setattr(request_cache, "MOST_HELD", most)
    cache = RequestCache(retriever)
    for ids in additions:
        cache.add(np.array(ids), np.arange(len(ids)))
    ranks = held_by_hand(additions, most)
    assert cache.ids.tolist() == sorted(ranks)
    assert [cache.rank_of(i) for i in range(60)] == [ranks.get(i) for i in range(60)]
    found = cache.best(2.0, k)
    expected = Retrieved.best(cache.ids, 2 * SCORES[cache.ids], k)
    assert np.array_equal(found.ids, expected.ids)
    assert np.array_equal(found.scores, expected.scores)


@given(st.sets(st.integers(0, 59), min_size=1), st.lists(st.integers(0, 59)), st.integers(1, 10))
def test_it_finds_the_best_of_what_it_holds_and_of_others(retriever, held, others, k):
    cache = RequestCache(retriever)
    cache.add(np.array(sorted(held)), np.zeros(len(held), dtype=np.int64))
    found = cache.best(1.0, k, np.array(others, dtype=np.int64))
    ids = np.array(sorted(held | set(others)))
    expected = Retrieved.best(ids, SCORES[ids], k)
    assert np.array_equal(found.ids, expected.ids)
    assert cache.ids.tolist() == sorted(held)  # others are not kept
