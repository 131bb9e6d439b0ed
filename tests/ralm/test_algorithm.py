"""The engine: whatever is speculated, the text is that of the baseline."""

from __future__ import annotations

import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from walks import ENTRIES, Slow, Vectors, Walk, assert_no_search_goes_on, generated

from hf_refspec.ralm import request_cache, run
from hf_refspec.ralm.checked_search import RunningSearch
from hf_refspec.ralm.options import RalmSpeculation
from hf_refspec.ralm.request_cache import LEARNED, RequestCache
from hf_refspec.ralm.run import generate_with_retrieval
from hf_refspec.retrieval.retriever import Retrieved

speculations = st.builds(
    RalmSpeculation,
    prefetch=st.sampled_from([1, 3, 20]),
    stride=st.one_of(st.just("os3"), st.integers(1, 9)),
    asynchronous=st.booleans(),
    max_gamma=st.sampled_from([None, 0.6]),
    prefetch_searches=st.sampled_from(["all", "first"]),
)


@contextmanager
def all_ids_are_kept():
    """As where steps take time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request_cache, "EARLIER_COST", 1e9)
        yield


class Uneven(Vectors):
    """Of searches that run at once, a later one may end first."""

    def search(self, queries, k):
        time.sleep(0.001 * (-self.searches % 3))
        return super().search(queries, k)


@settings(max_examples=150, deadline=None)
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


def test_stats_are_cleared_filled_and_printed():
    _, stats = generated(RalmSpeculation(), Slow())
    again = generate_with_retrieval(Walk(2, 0), Slow(), None, 1, stats=stats)
    assert again is stats
    assert (stats.steps, stats.searches, stats.strides) == (2, 2, [])
    assert stats.search_seconds >= 0.04
    assert "2 steps, 2 queries in 2 searches" in str(stats)
    assert stats.to_dict()["retrievals"] == 2


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


class Timed:
    """A retriever, its searches and a text in virtual time: a step takes a second, a search goes on
    beside it. All steps need one passage, or, without `right`, each another."""

    now = 0.0

    topic = 0  # other topics need other passages

    def __init__(self, search_seconds=50.0, right=True, per_query=0.0, per_id=0.0):
        self.search_seconds, self.right, self.per_query = search_seconds, right, per_query
        self.per_id = per_id

    model_threads = 1
    concurrent_searches = 1

    def generated(self, speculation, length=100):
        self.length = length
        self.steps = []
        self.begun = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(run, "CheckedRetriever", lambda *args: self)
            patch.setattr(run, "usable_cores", lambda: 2)
            options = {"clock": lambda: self.now, "model_threads": self.model_threads}
            try:
                return generate_with_retrieval(self, self, speculation, 1, **options)
            finally:
                self.begun = []  # what it holds cannot be pickled

    def begin(self, queries, count):
        seconds = self.search_seconds + self.per_query * (len(queries) - 1)
        answer = SimpleNamespace(done=lambda: self.now >= search.began + seconds, seconds=seconds)
        search = RunningSearch(queries, count, self.now, answer)
        self.begun.append(search)
        return search

    @property
    def idle(self):
        return self.concurrent_searches - sum(not search.answer.done() for search in self.begun)

    def finish(self, search):
        seconds = search.answer.seconds
        self.now = max(self.now, search.began + seconds)
        found = [np.arange(search.count) + self.first(query) for query in search.queries]
        return [Retrieved(ids, np.zeros(len(ids))) for ids in found], seconds

    def first(self, query):
        return 10_000 * self.topic + (0 if self.right else 100 * query)

    def score(self, query, ids):
        self.now += self.per_id * len(ids)
        return -np.abs(ids - self.first(query)).astype(np.float32)

    def close(self):
        pass

    @property
    def finished(self):
        return len(self.steps) >= self.length

    def query(self):
        return len(self.steps)

    def step(self, found):
        self.now += 1.0
        self.steps.append(int(found.ids[0]))
        return len(self.steps) - 1, self.steps[-1]

    def agrees(self, step, truth):
        return step[1] == truth.ids[0]

    def roll_back(self, step):
        del self.steps[step[0] :]

    def commit(self, steps):
        pass


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


PS = RalmSpeculation.parse("ps")


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


def test_all_is_measured_by_the_clock_that_is_given():
    stats = Timed().generated(None, length=10)
    assert (stats.model_seconds, stats.search_seconds) == (10, 500)
    assert stats.waiting_seconds == 500


@pytest.mark.parametrize("letters", ["ps", "psa"])
@pytest.mark.parametrize("steps", [6, 48])
@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("search_seconds", [0.0, 0.05, 0.3, 1.0, 5.0, 20.0])
def test_no_request_is_slower_than_waiting_for_every_search(letters, steps, right, search_seconds):
    for per_query, concurrent in product((0.0, search_seconds), (1, 8)):
        retriever = Timed(search_seconds, right, per_query)
        retriever.concurrent_searches = concurrent
        for retriever.topic in (0, 0, 0, 0, 1, 2, 3, 3):
            began = retriever.now
            retriever.generated(RalmSpeculation.parse(letters), steps)
            seconds = retriever.now - began
            assert seconds <= steps * (1 + search_seconds) / 0.97, (per_query, seconds)


class OnTwoCores(Timed):
    """As above, but the search runs on the model's two cores: while both run, they slow each other
    down `slower` times."""

    search_threads = model_threads = 2
    slower = 2.0

    def begin(self, queries, count):
        answer = SimpleNamespace(done=lambda: answer.left <= 0, end=0.0)
        answer.left = self.search_seconds + self.per_query * (len(queries) - 1)
        self.running = RunningSearch(queries, count, self.now, answer)
        return self.running

    def step(self, found):
        answer = self.running.answer
        if answer.left > 0:
            together = min(1.0, answer.left)
            self.now += together * (self.slower - 1)
            answer.left -= together
            if answer.left <= 0:
                answer.end = self.now + together
        return super().step(found)

    def finish(self, search):
        answer = search.answer
        self.now += max(answer.left, 0.0)
        answer.left = 0.0
        answer.end = answer.end or self.now
        answer.seconds = answer.end - search.began
        return super().finish(search)


@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("slower", [2.0, 3.0])
@pytest.mark.parametrize("search_seconds", [0.3, 0.8, 5.0])
def test_with_as_many_threads_as_cores_no_request_is_slower_than_waiting(
    search_seconds, slower, right
):
    retriever = OnTwoCores(search_seconds, right, per_query=search_seconds / 4)
    retriever.slower = slower
    for retriever.topic in (0, 0, 1, 2, 2):
        began = retriever.now
        stats = retriever.generated(RalmSpeculation(), 12)
        assert stats.contention == 2.0 and "contention 2.00" in str(stats)
        assert retriever.now - began <= 12 * (1 + search_seconds) / 0.97


def test_steps_go_on_beside_searches_where_cores_are_left_to_them():
    seconds = []
    for threads in (2, 1):
        retriever = OnTwoCores(search_seconds=2.0, per_query=1.0)
        retriever.search_threads = retriever.model_threads = threads
        retriever.slower = 1.25
        for _ in range(3):
            stats = retriever.generated(RalmSpeculation())
        assert stats.contention == (2.0 if threads == 2 else 1.0)
        seconds.append(retriever.now)
    assert seconds[1] < 0.8 * seconds[0]


def test_it_speculates_again_once_searches_take_longer():
    retriever = Timed(search_seconds=0.01)
    assert retriever.generated(RalmSpeculation()).speculated == 0
    retriever.search_seconds = 20.0
    retriever.generated(RalmSpeculation())
    assert retriever.generated(RalmSpeculation()).searches < 20


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


@pytest.mark.parametrize("base", [list, type("Slotted", (), {"__slots__": ()})])
def test_a_retriever_that_can_keep_nothing_is_none_the_worse(base):
    class Bare(base):
        __slots__ = ()

        def search(self, queries, k):
            return Vectors().search(queries, k)

        def score(self, query, ids):
            return Vectors().score(query, ids)

    assert generated(RalmSpeculation(), Bare())[0] == generated(None, Vectors())[0]


def test_more_prefetched_than_a_graph_is_walked_for_is_refused():
    retriever = Vectors()
    retriever.index = "hnsw"
    with pytest.raises(ValueError, match="prefetch must be at most 128"):
        generated(RalmSpeculation(prefetch=200), retriever)
    assert generated(RalmSpeculation(prefetch=200), retriever, k=200)[1].steps > 0
    retriever.ef_search = 200
    assert generated(RalmSpeculation(prefetch=200), retriever)[1].steps > 0
    assert generated(RalmSpeculation(prefetch=200), Vectors())[1].steps > 0
