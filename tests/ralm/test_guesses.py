"""The choice between the request cache and an index, in virtual time."""

from __future__ import annotations

import numpy as np
import pytest

from hf_refspec.ralm.engine import generate_speculatively
from hf_refspec.ralm.options import Speculation
from hf_refspec.retrieval.retrieved import Retrieved


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
