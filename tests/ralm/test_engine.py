"""The engine: whatever is speculated, the text is that of the baseline."""

from __future__ import annotations

import threading
import time
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_refspec.ralm.checked_search import RetrievalError
from hf_refspec.ralm.engine import generate_speculatively
from hf_refspec.ralm.gamma import GammaByLag
from hf_refspec.ralm.options import Speculation
from hf_refspec.ralm.os3 import SearchSeconds
from hf_refspec.retrieval.retrieved import Retrieved

ENTRIES = 40


class Vectors:
    """An exact retriever over random vectors, with ties."""

    def __init__(self, seed: int = 0, entries: int = ENTRIES):
        rng = np.random.default_rng(seed)
        self.vectors = rng.integers(-2, 3, (entries, 3)).astype(np.float32)
        self.searches = 0

    def encode(self, token_ids):
        raise AssertionError("the texts of this file have vectors")

    def search(self, queries, k):
        self.searches += 1
        ids = np.arange(len(self.vectors))
        return [Retrieved.best(ids, self.score(query, ids), k) for query in queries]

    def score(self, query, ids):
        return self.vectors[ids] @ query

    def passage(self, passage_id):
        raise AssertionError("nobody asks")


class Walk:
    """A text whose queries depend on all that was retrieved before."""

    def __init__(self, length: int, seed: int, jumpiness: float = 0.5):
        self.length = length
        self.steps: list[tuple[int, ...]] = []
        self.committed: list[tuple[int, ...]] = []
        self.noise = np.random.default_rng(seed).standard_normal((length + 1, 3))
        self.jumpiness = jumpiness

    @property
    def finished(self):
        # It depends on what was retrieved: a wrong step may end it.
        ended = bool(self.steps) and len(self.steps) > self.length // 2 and self.steps[-1][0] == 3
        return ended or len(self.steps) >= self.length

    def query(self):
        past = np.array([sum(ids) % 5 - 2 for ids in self.steps[-3:]] or [0.0]).mean()
        return (1 + past + self.jumpiness * self.noise[len(self.steps)]).astype(np.float32)

    def step(self, found):
        self.steps.append(tuple(found.ids.tolist()))
        return len(self.steps) - 1, self.steps[-1]

    def agrees(self, step, truth):
        return step[1] == tuple(truth.ids.tolist())

    def roll_back(self, step):
        assert step[0] >= len(self.committed)
        del self.steps[step[0] :]

    def commit(self, steps):
        for number, ids in steps:
            assert number == len(self.committed)
            self.committed.append(ids)


def generated(speculation, retriever, length=20, seed=0, jumpiness=0.5, k=1, **beside_cache):
    text = Walk(length, seed, jumpiness)
    stats = generate_speculatively(text, retriever, speculation, k, **beside_cache)
    assert text.finished
    assert text.committed == text.steps
    return text.steps, stats


speculations = st.builds(
    Speculation,
    prefetch=st.sampled_from([1, 3, 20]),
    stride=st.one_of(st.just("os3"), st.integers(1, 9)),
    asynchronous=st.booleans(),
    max_gamma=st.sampled_from([None, 0.6]),
    steps_ahead=st.sampled_from([None, 1, 4]),
)


@settings(max_examples=150, deadline=None)
@given(
    speculation=speculations,
    seed=st.integers(0, 2**16),
    jumpiness=st.sampled_from([0.0, 0.5, 3.0]),
    k=st.sampled_from([1, 4]),
    length=st.integers(0, 30),
    nearby=st.booleans(),
    indexed=st.booleans(),
)
def test_no_speculation_changes_the_text(speculation, seed, jumpiness, k, length, nearby, indexed):
    retriever = Vectors(seed)
    args = (length, seed, jumpiness, k)
    plain, plain_stats = generated(None, retriever, *args)
    neighbours = (lambda ids: np.minimum(ids + 1, ENTRIES - 1)) if nearby else None
    candidates = (lambda query, k: np.arange(0, ENTRIES, 3)) if indexed else None
    beside_cache = {"neighbours": neighbours, "candidates": candidates}
    steps, stats = generated(speculation, retriever, *args, **beside_cache)
    assert steps == plain
    assert stats.best_ids == plain_stats.best_ids == [ids[0] for ids in plain]
    assert stats.speculated == stats.verified + stats.mismatched + stats.discarded
    assert sum(stats.speculation_was_right) == stats.verified
    assert sum(stats.strides) + bool(length) == stats.retrievals
    assert len(stats.strides) + bool(length) == stats.searches
    assert plain_stats.retrievals == plain_stats.searches == len(plain)


@pytest.mark.parametrize("letters", ["", "p", "s", "a", "ps", "pa", "sa", "psa"])
def test_every_ablation_gives_the_text_of_the_baseline(letters):
    plain, _ = generated(None, Vectors())
    for speculation in (Speculation.parse(letters), Speculation.published(letters)):
        steps, stats = generated(speculation, Vectors())
        assert steps == plain
        assert stats.searches < len(plain)


def test_the_letters_mean_what_they_mean_in_the_paper():
    plain = Speculation.parse("")
    assert (plain.prefetch, plain.stride, plain.asynchronous) == (1, 3, False)
    full = Speculation.published("sap")
    assert (full.prefetch, full.stride, full.asynchronous) == (20, "os3", True)
    assert (full.max_gamma, full.steps_ahead) == (0.6, 1)
    assert not full.pq_index
    assert Speculation.parse("psa") == Speculation()
    assert Speculation.parse(None) is None
    assert Speculation.parse(full) is full


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: Speculation.parse("pqs"), ValueError),
        (lambda: Speculation.parse("pp"), ValueError),
        (lambda: Speculation.parse(True), TypeError),
        (lambda: Speculation(prefetch=0), ValueError),
        (lambda: Speculation(prefetch="auto"), TypeError),
        (lambda: Speculation(stride=0), ValueError),
        (lambda: Speculation(stride=2.5), TypeError),
        (lambda: Speculation(asynchronous="yes"), TypeError),
        (lambda: Speculation(pq_index=1), TypeError),
        (lambda: Speculation(max_gamma=1.0), ValueError),
        (lambda: Speculation(steps_ahead=0), ValueError),
        (lambda: Speculation(window=0), ValueError),
        (lambda: Speculation(timeout=0), ValueError),
    ],
)
def test_bad_options_are_refused(make, error):
    with pytest.raises(error):
        make()


class Slow(Vectors):
    def search(self, queries, k):
        time.sleep(0.02)
        return super().search(queries, k)


def test_while_a_search_runs_speculation_goes_on():
    options = {"stride": 2, "prefetch": ENTRIES}
    plain, _ = generated(None, Vectors())
    waited, waiting = generated(Speculation(asynchronous=False, **options), Slow())
    went_on, stats = generated(Speculation(asynchronous=True, **options), Slow())
    assert waited == went_on == plain
    assert stats.searches < waiting.searches
    assert max(stats.strides) > 2 == max(waiting.strides)


class Failing(Vectors):
    """Raises from its n-th search on, so many times."""

    def __init__(self, at: int, times: int):
        super().__init__()
        self.at, self.times = at, times

    def search(self, queries, k):
        found = super().search(queries, k)
        if self.at <= self.searches < self.at + self.times:
            raise ConnectionError("gone")
        return found


@pytest.mark.parametrize("speculation", [None, *map(Speculation.parse, ("", "psa"))])
@pytest.mark.parametrize("at", [1, 3])
def test_a_search_that_fails_is_tried_once_more(speculation, at):
    plain, _ = generated(None, Vectors())
    assert generated(speculation, Failing(at, times=1))[0] == plain
    text = Walk(20, 0)
    with pytest.raises(RetrievalError, match=r"Failing.search raised ConnectionError 2.*gone") as e:
        generate_speculatively(text, Failing(at, times=2), speculation, k=1)
    assert isinstance(e.value.__cause__, ConnectionError)
    assert text.steps == text.committed == plain[: len(text.steps)]


class Stalling(Vectors):
    """Does not answer its n-th search, so many times, until it is released."""

    def __init__(self, at: int, times: int):
        super().__init__()
        self.at, self.times = at, times
        self.released = threading.Event()

    def search(self, queries, k):
        found = super().search(queries, k)
        if self.at <= self.searches < self.at + self.times:
            self.released.wait(10)
        return found


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_search_that_stalls_is_tried_once_more_and_leaves_no_thread(asynchronous):
    speculation = Speculation(asynchronous=asynchronous, timeout=0.1)
    plain, _ = generated(None, Vectors())
    once, twice = Stalling(3, times=1), Stalling(3, times=2)
    assert generated(speculation, once)[0] == plain
    text = Walk(20, 0)
    with pytest.raises(RetrievalError, match=r"time limit of 0\.1 seconds"):
        generate_speculatively(text, twice, speculation, k=1)
    assert text.steps == text.committed == plain[: len(text.steps)]
    once.released.set()
    twice.released.set()
    deadline = time.monotonic() + 5
    while any(thread.name == "retrieval" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


class FailingScore(Vectors):
    def score(self, query, ids):
        if threading.current_thread().name != "retrieval":
            raise KeyError("unknown id")
        return super().score(query, ids)


def test_a_score_that_fails_is_named():
    with pytest.raises(RetrievalError, match=r"FailingScore.score raised KeyError 2 times"):
        generated(Speculation(), FailingScore())


def one(ids, scores):
    return Retrieved(np.array(ids), np.array(scores, dtype=np.float32))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "must return a list"),
        ([], "returned 0 answers"),
        ([one([1], [1.0])] * 2, "returned 2 answers"),
        ([([1], [1.0])], "must return a list of Retrieved"),
        ([one([], [])], "knowledge base empty"),
        ([one([1, 2], [1.0])], "shape"),
        ([one([-1], [1.0])], "no passage's"),
        ([one([1.5], [1.0])], "no passage's"),
        ([one([4, 4], [1.0, 1.0])], "twice"),
        ([one([4], [np.nan])], "not finite"),
        ([one([4], [np.inf])], "not finite"),
    ],
)
def test_answers_that_cannot_be_are_named(answer, message):
    class Wrong(Vectors):
        def search(self, queries, k):
            return answer

    for speculation in (None, Speculation()):
        with pytest.raises(RetrievalError, match=rf"Wrong.search.*{message}"):
            generated(speculation, Wrong())


def test_too_few_passages_are_named_where_there_are_more():
    class Few(Vectors):
        def search(self, queries, k):
            found = super().search(queries, k)
            return [Retrieved(f.ids[:n], f.scores[:n]) for f in found for n in [5 - self.searches]]

    with pytest.raises(RetrievalError, match="3 of 4 passages"):
        generated(Speculation(stride=2), Few(), k=4)
    small = Vectors(entries=3)  # which has no more
    assert generated(Speculation(), small, k=5)[0] == generated(None, small, k=5)[0]


def test_ids_that_change_from_search_to_search_are_taken_as_they_come():
    class Changing(Vectors):
        def search(self, queries, k):
            self.vectors = np.roll(self.vectors, 1, axis=0)
            return super().search(queries, k)

    _, stats = generated(Speculation(), Changing())
    assert stats.mismatched > 0


def test_an_exception_of_the_text_comes_through_and_leaves_no_thread():
    class Broken(Walk):
        def step(self, found):
            if len(self.steps) == 5:
                raise KeyboardInterrupt
            return super().step(found)

    with pytest.raises(KeyboardInterrupt):
        generate_speculatively(Broken(20, 0), Slow(), Speculation(), k=1)
    time.sleep(0.1)
    assert not any(thread.name == "retrieval" for thread in threading.enumerate())


def test_stats_are_cleared_filled_and_printed():
    _, stats = generated(Speculation(), Slow())
    again = generate_speculatively(Walk(2, 0), Slow(), None, 1, stats=stats)
    assert again is stats
    assert (stats.steps, stats.searches, stats.strides) == (2, 2, [])
    assert stats.verification_seconds >= 0.04
    assert stats.waiting_seconds > stats.model_seconds
    assert "2 steps, 2 queries in 2 searches" in str(stats)
    assert (
        repr(stats) == "RetrievalStats(steps=2, searches=2, speculated=0, verified=0, gamma=0.00)"
    )
    assert stats.to_dict()["retrievals"] == 2


PSA = Speculation.parse("psa")


class Told(GammaByLag):
    """What a request was told of earlier ones, and what it told."""

    made: ClassVar[list[Told]] = []

    def __init__(self, window, seen=None):
        super().__init__(window, seen)
        self.seen, self.told = seen, []
        self.made.append(self)

    def record(self, lags, right):
        super().record(lags, right)
        self.told.append((lags, right))


@pytest.fixture
def gammas(monkeypatch) -> list[Told]:
    monkeypatch.setattr("hf_refspec.ralm.guesses.GammaByLag", Told)
    monkeypatch.setattr(Told, "made", [])
    return Told.made


def test_a_request_begins_with_what_the_last_one_of_its_kind_has_seen(gammas, monkeypatch):
    retriever, samples = Vectors(), []

    class Handed(SearchSeconds):
        def __init__(self, earlier=()):
            samples.append(list(earlier))
            super().__init__(earlier)

    monkeypatch.setattr("hf_refspec.ralm.guesses.SearchSeconds", Handed)
    generated(PSA, retriever)
    generated(PSA, retriever)
    first, second = gammas
    assert first.seen is None and np.array_equal(second.seen, first.remembered())
    assert second.seen.sum() > 0 and samples[0] == [] and len(samples[1]) > 1
    for other in ("sa", "ps"):  # of another kind
        generated(Speculation.parse(other), retriever)
        assert gammas[-1].seen is None and samples[-1] == []
    generated(PSA, Vectors())  # nor is another retriever the same
    assert gammas[-1].seen is None
    assert generated(PSA, retriever)[0] == generated(None, retriever)[0]


def test_as_published_nothing_is_left_to_others_nor_taken_from_them(gammas):
    retriever = Vectors()
    before = vars(retriever).keys() | {"searches"}
    generated(Speculation.published("psa"), retriever)
    assert vars(retriever).keys() == before and not gammas
    generated(PSA, retriever)
    generated(Speculation.published("psa"), retriever)
    generated(PSA, retriever)
    first, second = gammas
    assert np.array_equal(second.seen, first.remembered())


def test_a_lag_counts_the_steps_since_the_last_search_that_the_cache_has(gammas):
    generated(Speculation(stride=4, asynchronous=False), Vectors())
    [gamma] = gammas
    assert all(lags == list(range(1, len(lags) + 1)) for lags, _ in gamma.told)


def test_beside_a_verification_the_lag_counts_the_steps_that_it_is_about(gammas):
    generated(Speculation(stride=2, steps_ahead=3), Slow(), length=40, jumpiness=1.0)
    [gamma] = gammas
    (lags, right), outcomes = gamma.told[0], set()
    assert lags == [1, 2][: len(lags)]
    for next_lags, next_right in gamma.told[1:]:
        all_right = right == len(lags)
        begun = [len(lags) + i for i in (1, 2, 3)] if all_right else [1, 2]
        assert next_lags == begun[: len(next_lags)]
        outcomes.add(all_right)
        lags, right = next_lags, next_right
    assert outcomes == {True, False}


@pytest.mark.parametrize("base", [list, type("Slotted", (), {"__slots__": ()})])
def test_a_retriever_that_can_keep_nothing_is_none_the_worse(base):
    class Bare(base):
        __slots__ = ()

        def search(self, queries, k):
            return Vectors().search(queries, k)

        def score(self, query, ids):
            return Vectors().score(query, ids)

    assert generated(PSA, Bare())[0] == generated(None, Vectors())[0]


def test_more_prefetched_than_a_graph_is_walked_for_is_refused():
    retriever = Vectors()
    retriever.index = "hnsw"
    with pytest.raises(ValueError, match="prefetch must be at most 128"):
        generated(Speculation(prefetch=200), retriever)
    assert generated(Speculation(prefetch=200), retriever, k=200)[1].steps > 0
    assert generated(Speculation(prefetch=200), Vectors())[1].steps > 0


class VirtualTime:
    """A clock that stands still but for what is waited by it."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def wait(self, seconds):
        self.now += seconds


class Timed:
    """The query of a step is its number; what is found is near the last one, or anywhere.

    Args:
        clock ([`VirtualTime`]): A search takes so long by it, whatever the batch.
        search_seconds (`float`): How long.
        jumps (`float`): How often it is anywhere: a request cache does not have it then.
    """

    ENTRIES = 100_000

    def __init__(self, clock, search_seconds, jumps, steps):
        rng = np.random.default_rng(0)
        self.clock, self.search_seconds = clock, search_seconds
        anywhere = rng.integers(0, self.ENTRIES, steps)
        last_jump = np.maximum.accumulate(np.where(rng.random(steps) < jumps, np.arange(steps), 0))
        self.answers = anywhere[last_jump]

    def search(self, queries, k):
        self.clock.wait(self.search_seconds)
        near = np.arange(-k, k + 1)
        found = [np.unique(np.clip(self.answers[q] + near, 0, self.ENTRIES - 1)) for q in queries]
        pairs = zip(queries, found, strict=True)
        return [Retrieved.best(ids, self.score(query, ids), k) for query, ids in pairs]

    def score(self, query, ids):
        return -np.abs(ids - self.answers[query]).astype(np.float32)


class TimedText:
    """A step takes a second."""

    def __init__(self, clock, length):
        self.clock, self.length, self.steps = clock, length, []

    @property
    def finished(self):
        return len(self.steps) >= self.length

    def query(self):
        return len(self.steps)

    def step(self, found):
        self.clock.wait(1.0)
        self.steps.append(int(found.ids[0]))
        return len(self.steps) - 1, self.steps[-1]

    def agrees(self, step, truth):
        return step[1] == int(truth.ids[0])

    def roll_back(self, step):
        del self.steps[step[0] :]

    def commit(self, steps):
        pass


def in_virtual_time(search_seconds, jumps, index_seconds=None, requests=1, steps=200):
    """How long texts take, and how often an index was asked, which always has what is searched."""
    clock, asked = VirtualTime(), 0
    retriever = Timed(clock, search_seconds, jumps, steps)

    def candidates(query, k):
        nonlocal asked
        asked += 1
        clock.wait(index_seconds)
        return retriever.answers[query : query + 1]

    for _ in range(requests):
        text = TimedText(clock, steps)
        generate_speculatively(
            text,
            retriever,
            Speculation(asynchronous=False),
            k=1,
            candidates=None if index_seconds is None else candidates,
            clock=clock,
        )
        assert text.steps == retriever.answers.tolist()
    return clock.now, asked


@pytest.mark.parametrize("requests", [1, 3])
def test_an_index_guesses_where_mistakes_cost_more_than_it_does(requests):
    seconds, asked = in_virtual_time(50.0, jumps=0.3, index_seconds=0.5, requests=requests)
    with_cache, _ = in_virtual_time(50.0, jumps=0.3, requests=requests)
    assert asked > 150 * requests
    assert seconds < 0.65 * with_cache


@pytest.mark.parametrize(
    ("search_seconds", "jumps", "index_seconds"),
    [
        (50.0, 0.0, 20.0),  # the cache is right as well
        (0.5, 0.3, 5.0),  # a mistake costs less
    ],
)
def test_the_request_cache_guesses_where_an_index_costs_more_than_it_brings(
    search_seconds, jumps, index_seconds
):
    seconds, asked = in_virtual_time(search_seconds, jumps, index_seconds, requests=3)
    with_cache, _ = in_virtual_time(search_seconds, jumps, requests=3)
    assert 3 <= asked < 20  # of 600 steps: once a request, to time it
    assert seconds < 1.1 * with_cache + asked * index_seconds


@pytest.mark.parametrize(
    ("search_seconds", "jumps"), [(10.0, 0.05), (10.0, 0.1), (10.0, 0.2), (20.0, 0.05)]
)
def test_near_a_tie_the_choice_loses_little_against_the_request_cache(search_seconds, jumps):
    seconds, _ = in_virtual_time(search_seconds, jumps, index_seconds=1.0, requests=3)
    with_cache, _ = in_virtual_time(search_seconds, jumps, requests=3)
    assert seconds < 1.15 * with_cache


def test_all_is_measured_by_the_clock_that_is_given():
    clock = VirtualTime()
    retriever, text = Timed(clock, 3.0, jumps=0.5, steps=10), TimedText(clock, 10)
    stats = generate_speculatively(text, retriever, None, k=1, clock=clock)
    assert clock.now == 40.0
    assert (stats.model_seconds, stats.verification_seconds) == (10, 30)
    assert stats.waiting_seconds <= 30  # a search may have ended before it is waited for
