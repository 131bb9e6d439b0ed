from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_refspec.ralm.checked_search import CheckedRetriever
from hf_refspec.ralm.request_cache import RequestCache
from hf_refspec.retrieval.retrieved import Retrieved

SCORES = np.random.default_rng(0).integers(0, 5, 60).astype(np.float32)  # many are the same


class Scored:
    def score(self, query, ids):
        return SCORES[ids] * query


@pytest.fixture(scope="module")
def retriever():
    with CheckedRetriever(Scored(), k=1, timeout=None) as retriever:
        yield retriever


def held_by_hand(additions: list[list[int]], most: int) -> list[int]:
    """Ids: the twin of what is added."""
    last_added: dict[int, int] = {}
    for number, ids in enumerate(additions):
        last_added.update(dict.fromkeys(ids, number))
        kept = sorted(last_added, key=lambda i: (-last_added[i], i))[: max(most, len(set(ids)))]
        last_added = {i: last_added[i] for i in kept}
    return sorted(last_added)


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 59), min_size=1, max_size=12), min_size=1, max_size=8),
    st.integers(3, 80),
    st.integers(1, 10),
)
def test_it_holds_what_was_added_last_and_finds_the_best_of_that(retriever, additions, most, k):
    cache = RequestCache(retriever, most)
    for ids in additions:
        cache.add(np.array(ids))
    assert cache.ids.tolist() == held_by_hand(additions, most)
    found = cache.best(2.0, k)
    expected = Retrieved.best(cache.ids, 2 * SCORES[cache.ids], k)
    assert np.array_equal(found.ids, expected.ids)
    assert np.array_equal(found.scores, expected.scores)
