"""Texts that retrieve at every step, and a retriever for them."""

import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest

from hf_refspec.ralm import algorithm, run
from hf_refspec.ralm.checked_search import RunningSearch
from hf_refspec.ralm.run import generate_with_retrieval
from hf_refspec.retrieval.retriever import Retrieved

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
    stats = generate_with_retrieval(text, retriever, speculation, k, **beside_cache)
    assert text.finished
    assert text.committed == text.steps
    return text.steps, stats


def assert_no_search_goes_on() -> None:
    """Waits a little, since a thread ends only with its search."""
    deadline = time.monotonic() + 60
    while any(thread.name.startswith("retrieval") for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Slow(Vectors):
    def search(self, queries, k):
        time.sleep(0.02)
        return super().search(queries, k)


@contextmanager
def all_ids_are_kept():
    """As where steps take time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "EARLIER_COST", 1e9)
        yield


class Timed:
    """A retriever, its searches and a text in virtual time: a step takes a second, a search goes on
    beside it. All steps need one passage, or, without `right`, each another."""

    now = 0.0

    topic = 0  # other topics need other passages

    def __init__(self, search_seconds=50.0, right=True, per_query=0.0, per_id=0.0):
        self.search_seconds = search_seconds
        self.right = right
        self.per_query = per_query
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
            patch.setattr(algorithm, "perf_counter", lambda: self.now)
            threads = {"model_threads": self.model_threads}
            try:
                return generate_with_retrieval(self, self, speculation, 1, **threads)
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
