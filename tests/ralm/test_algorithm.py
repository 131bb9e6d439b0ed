"""Algorithm 1: whatever is speculated, the text is the baseline's."""

import time
from dataclasses import replace
from itertools import product
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_refspec.ralm import algorithm
from hf_refspec.ralm.algorithm import RequestCache
from hf_refspec.ralm.checked_search import RalmError
from hf_refspec.ralm.options import RalmSpeculation
from hf_refspec.ralm.run import generate_with_retrieval
from tests.helpers.walks import (
    ENTRIES,
    Slow,
    Timed,
    Vectors,
    Walk,
    all_ids_are_kept,
    assert_no_search_goes_on,
    generated,
)

speculations = st.builds(
    RalmSpeculation,
    prefetch=st.sampled_from([1, 3, 20]),
    stride=st.one_of(st.just("os3"), st.integers(1, 9)),
    asynchronous=st.booleans(),
    max_gamma=st.sampled_from([None, 0.6]),
    prefetch_searches=st.sampled_from(["all", "first"]),
)


class Uneven(Vectors):
    """Of searches that run at once, a later one may end first."""

    def search(self, queries, k):
        time.sleep(0.001 * (-self.searches % 3))
        return super().search(queries, k)


@given(
    speculation=speculations,
    seed=st.integers(0, 2**16),
    jumpiness=st.sampled_from([0.0, 0.5, 3.0]),
    k=st.sampled_from([1, 4]),
    length=st.integers(0, 30),
    nearby=st.booleans(),
    concurrent=st.sampled_from([1, 3]),
)
def test_no_speculation_changes_the_text(
    speculation, seed, jumpiness, k, length, nearby, concurrent
):
    retriever = Uneven(seed) if concurrent > 1 else Vectors(seed)
    retriever.concurrent_searches = concurrent
    neighbours = (lambda ids: np.minimum(ids + 1, ENTRIES - 1)) if nearby else None
    for request in (seed, seed, seed + 1):
        args = (length, request, jumpiness, k)
        plain, plain_stats = generated(None, retriever, *args)
        with all_ids_are_kept():
            steps, stats = generated(speculation, retriever, *args, neighbours=neighbours)
        assert steps == plain
        assert stats.best_ids == plain_stats.best_ids == [ids[0] for ids in plain]
        assert stats.speculated == stats.verified + stats.mismatched + stats.discarded
        assert sum(stats.speculation_was_right) == stats.verified
        initial = stats.searches - len(stats.strides)  # the search that no verification is
        assert sum(stats.strides) + initial == stats.retrievals and initial <= bool(length)
        assert initial == bool(length) or speculation.max_gamma is None
        assert plain_stats.retrievals == plain_stats.searches == len(plain)


def test_while_a_search_runs_speculation_goes_on():
    options = {"stride": 2, "prefetch": ENTRIES}
    plain, _ = generated(None, Vectors())
    both = [RalmSpeculation(asynchronous=asynchronous, **options) for asynchronous in (False, True)]
    assert [generated(speculation, Slow())[0] for speculation in both] == [plain, plain]
    waiting, went_on = (Timed().generated(speculation) for speculation in both)
    assert went_on.searches < waiting.searches
    assert max(went_on.strides) > 2 == max(waiting.strides)


def test_ids_that_change_from_search_to_search_are_taken_as_they_come():
    class Changing(Vectors):
        def search(self, queries, k):
            self.vectors = np.roll(self.vectors, 1, axis=0)
            return super().search(queries, k)

    _, stats = generated(RalmSpeculation(stride=3, asynchronous=False), Changing())
    assert stats.mismatched > 0


def test_an_exception_of_the_text_comes_through_and_leaves_no_thread():
    class Broken(Walk):
        def step(self, found):
            if len(self.steps) == 5:
                raise KeyboardInterrupt
            return super().step(found)

    with pytest.raises(KeyboardInterrupt):
        generate_with_retrieval(Broken(20, 0), Slow(), RalmSpeculation(), k=1)
    assert_no_search_goes_on()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_error_while_steps_are_verified_undoes_them(asynchronous):
    class Gone(Walk):
        asked = 0

        def agrees(self, step, truth):
            self.asked += 1
            if self.asked == 2:
                raise RalmError("its passage is gone")
            return super().agrees(step, truth)

    text = Gone(20, 0)
    with pytest.raises(RalmError, match="passage is gone"):
        generate_with_retrieval(text, Slow(), RalmSpeculation(20, 3, asynchronous), k=1)
    assert text.steps == text.committed


@pytest.mark.parametrize("letters", ["", "p"])
def test_of_the_steps_of_a_published_search_only_the_guessed_ones_are_made_in_vain(letters):
    """A stride of 3: one step with a verified passage, two guesses. The third query waits."""
    for seed in range(9):
        _, stats = generated(RalmSpeculation.published(letters), Vectors(seed), jumpiness=3.0)
        assert max(stats.strides) == 3
        assert stats.speculated <= 2 * len(stats.strides)


def test_as_published_only_the_first_search_prefetches():
    class Counting(Vectors):
        counts = ()

        def search(self, queries, k):
            self.counts += (k,)
            return super().search(queries, k)

    for searches, others in (("first", 1), ("all", 20)):
        retriever = Counting()
        published = replace(RalmSpeculation.published("p"), prefetch_searches=searches)
        generated(published, retriever)
        assert retriever.counts[0] == 20 and set(retriever.counts[1:]) == {others}


class TenEach(Timed):
    """Every ten steps need another passage, which no guess knows."""

    def first(self, query):
        return 1000 * (query // 10)


def test_searches_that_may_run_at_once_verify_steps_sooner():
    seconds = {}
    for concurrent in (1, 2, 8):
        retriever = TenEach(search_seconds=20.0)
        retriever.concurrent_searches = concurrent
        stats = retriever.generated(RalmSpeculation())
        assert stats.steps == 100
        assert stats.speculated == stats.verified + stats.mismatched + stats.discarded
        seconds[concurrent] = retriever.now
    assert seconds[8] < 0.9 * seconds[2] < 0.8 * seconds[1]


def test_what_a_search_for_undone_steps_finds_is_guessed_from():
    """The first guess for each passage is wrong; later steps have asked for its passage by then."""
    retriever = TenEach(search_seconds=20.0)
    retriever.concurrent_searches = 8
    assert retriever.generated(RalmSpeculation()).mismatched <= 5


def test_as_published_no_search_begins_beside_another():
    retriever = TenEach(search_seconds=20.0)
    retriever.concurrent_searches = 8
    several = retriever.generated(RalmSpeculation.published("psa"))
    alone = TenEach(search_seconds=20.0).generated(RalmSpeculation.published("psa"))
    assert several.to_dict() == alone.to_dict()


def test_all_is_measured_by_one_clock():
    stats = Timed().generated(None, length=10)
    assert (stats.model_seconds, stats.search_seconds) == (10, 500)
    assert stats.waiting_seconds == 500


@pytest.mark.parametrize("letters", ["ps", "psa"])
@pytest.mark.parametrize("steps", [6, 48])
@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("search_seconds", [0.0, 0.05, 0.3, 1.0, 5.0, 20.0])
def test_no_request_is_slower_than_waiting_for_every_search(letters, steps, right, search_seconds):
    for per_query, concurrent in product({0.0, search_seconds}, (1, 8)):
        retriever = Timed(search_seconds, right, per_query)
        retriever.concurrent_searches = concurrent
        for retriever.topic in (0, 0, 0, 0, 1, 2, 3, 3):
            began = retriever.now
            retriever.generated(RalmSpeculation.parse(letters), steps)
            seconds = retriever.now - began
            assert seconds <= steps * (1 + search_seconds) / 0.97, (per_query, seconds)


def test_it_speculates_again_once_searches_take_longer():
    retriever = Timed(search_seconds=0.01)
    assert retriever.generated(RalmSpeculation()).speculated == 0
    retriever.search_seconds = 20.0
    retriever.generated(RalmSpeculation())
    assert retriever.generated(RalmSpeculation()).searches < 20


@given(
    st.lists(st.lists(st.integers(0, 59), min_size=1, max_size=12), min_size=1, max_size=8),
    st.integers(3, 80),
)
def test_the_request_cache_holds_what_was_added_last(additions, most):
    cache, last_added = RequestCache(), {}
    for number, ids in enumerate(additions):
        with patch.object(algorithm, "MOST_CACHED", most):
            cache.add(np.array(ids))
        last_added.update(dict.fromkeys(ids, number))
        kept = sorted(last_added, key=lambda i: (-last_added[i], i))[: max(most, len(set(ids)))]
        last_added = {i: last_added[i] for i in kept}
    assert cache.ids.tolist() == sorted(last_added)
