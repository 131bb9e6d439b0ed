"""What a request cache holds, and what a retriever keeps for the next request."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_refspec.ralm.options import RalmSpeculation
from hf_refspec.ralm.request_cache import LEARNED, RequestCache
from tests.helpers.walks import ENTRIES, Slow, Timed, Vectors, all_ids_are_kept, generated

PS = RalmSpeculation.parse("ps")


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 59), min_size=1, max_size=12), min_size=1, max_size=8),
    st.integers(3, 80),
)
def test_the_request_cache_holds_what_was_added_last(additions, most):
    cache, last_added = RequestCache(most), {}
    for number, ids in enumerate(additions):
        cache.add(np.array(ids))
        last_added.update(dict.fromkeys(ids, number))
        kept = sorted(last_added, key=lambda i: (-last_added[i], i))[: max(most, len(set(ids)))]
        last_added = {i: last_added[i] for i in kept}
    assert cache.ids.tolist() == sorted(last_added)


def test_a_request_begins_with_what_the_last_one_of_its_kind_has_seen():
    retriever = Timed()
    first, second = retriever.generated(PS), retriever.generated(PS)
    assert first.strides[:2] == Timed().generated(PS).strides[:2]
    assert second.strides[1] > first.strides[1]
    other = RalmSpeculation.parse("s")
    assert retriever.generated(other).strides == Timed().generated(other).strides


def test_as_published_nothing_is_left_to_others_nor_taken_from_them():
    retriever, published = Timed(), RalmSpeculation.published("ps")
    first = retriever.generated(published)
    assert retriever.generated(PS).strides == Timed().generated(PS).strides
    assert retriever.generated(published).strides == first.strides


def test_the_first_search_of_a_request_is_guessed_from_earlier_ones():
    for search_seconds in (0.5, 20.0):
        retriever = Timed(search_seconds)
        requests = [retriever.generated(RalmSpeculation(), length=9) for _ in range(4)]
        assert not requests[0].speculation_was_right[0] and requests[-1].speculation_was_right[0]
        assert requests[-1].waiting_seconds < requests[0].waiting_seconds
        retriever.topic = 1
        assert not retriever.generated(RalmSpeculation(), length=9).speculation_was_right[0]
        for copied in (deepcopy(retriever), pickle.loads(pickle.dumps(retriever))):
            strides = copied.generated(RalmSpeculation(), length=9).strides
            assert strides == Timed(search_seconds).generated(RalmSpeculation(), length=9).strides


def test_no_more_ids_are_kept_than_can_be_scored_in_a_twentieth_of_a_search_or_step():
    for search_seconds, most in ((0.3, 15), (20.0, 50)):
        retriever = Timed(search_seconds, per_id=0.001)
        for retriever.topic in range(20):
            retriever.generated(RalmSpeculation(), length=4)
        ((_, ids),) = vars(retriever)[LEARNED].values()
        assert 0.6 * most <= len(ids) <= 2 * most and ids[0] >= 190_000


@all_ids_are_kept()
def test_calls_of_several_threads_share_what_they_retrieve():
    retriever, plain = Slow(), [generated(None, Vectors(), 20, seed)[0] for seed in range(4)]
    with ThreadPoolExecutor(4) as threads:
        for _ in range(3):
            found = threads.map(partial(generated, RalmSpeculation(), retriever, 20), range(4))
            assert [steps for steps, _ in found] == plain
    ((_, ids),) = vars(retriever)[LEARNED].values()
    assert {i for steps in plain for step in steps for i in step} <= set(ids.tolist())


@pytest.mark.parametrize("speculation", [RalmSpeculation(), PS])
@all_ids_are_kept()
def test_ids_that_have_left_the_knowledge_base_are_forgotten(speculation):
    class Shrinking(Slow):
        def score(self, query, ids):
            return self.vectors[ids] @ query  # an IndexError

    retriever = Shrinking(entries=ENTRIES)
    generated(speculation, retriever)
    retriever.vectors = retriever.vectors[:10]
    plain, _ = generated(None, retriever, seed=1)
    for _ in range(2):
        assert generated(speculation, retriever, seed=1)[0] == plain
    ((_, ids),) = vars(retriever)[LEARNED].values()
    assert ids.max() < 10


@pytest.mark.parametrize("base", [list, type("Slotted", (), {"__slots__": ()})])
def test_a_retriever_that_can_keep_nothing_is_none_the_worse(base):
    class Bare(base):
        __slots__ = ()

        def search(self, queries, k):
            return Vectors().search(queries, k)

        def score(self, query, ids):
            return Vectors().score(query, ids)

    assert generated(RalmSpeculation(), Bare())[0] == generated(None, Vectors())[0]
