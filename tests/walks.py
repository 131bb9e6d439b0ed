"""Texts that retrieve at every step, and a retriever for them."""

from __future__ import annotations

import threading
import time

import numpy as np

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
