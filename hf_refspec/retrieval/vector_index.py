"""Search among vectors in two stages: an index finds candidates, and `score_rows` ranks them.

An index may round in its own way, which can depend on the batch. Speculation compares what a
request cache ranks first with what a search finds, so both must score alike to the last bit,
whatever else is in the batch: all final scores come from one kernel.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from typing import Literal, TypeAlias

import numpy as np
import torch

from ..kernels.kernel import kernel
from ..messages import require
from .int8_copy import UNDERFLOW, UNIT_ROUNDOFF, ApproximateScores, Int8Copy, vectorised
from .retriever import Retrieved

Metric: TypeAlias = Literal["inner_product", "l2"]
# How a retriever or a kNN datastore searches: exactly or approximately.
Index: TypeAlias = Literal["flat", "hnsw"]
_LINKS = 32  # of each vector in the graph

# The fewest candidates of an approximate search: what it finds must not depend on how many are
# wanted, since a request cache wants more than a step does.
LEAST_WALKED = 128
_LENGTHS_AT_ONCE = 1 << 16
_TOGETHER = 4  # queries of a scan, whose approximate scores are all in memory
# Beyond k, the fewest candidates that FAISS finds: they may be as good as the k-th.
_SPARE = 16
_MOST_CANDIDATES = 2048  # that FAISS finds for a query on a GPU


@vectorised
def score_row(rows, row, query, by_distance):
    """The inner product of a row of `rows` (n, d) and a query (d,), or minus their distance."""
    total = np.float32(0)
    if by_distance:
        for j in range(rows.shape[1]):
            difference = rows[row, j] - query[j]
            total -= difference * difference
    else:
        for j in range(rows.shape[1]):
            total += rows[row, j] * query[j]
    return total


@kernel("void(float32[:, ::1], int64[::1], float32[::1], boolean, float32[::1])", drafts=False)
def score_rows(rows, ids, query, by_distance, scores):
    """Writes the scores of the rows `ids` (m,), not checked, into `scores` (m,)."""
    for i in range(len(ids)):
        scores[i] = score_row(rows, ids[i], query, by_distance)


def squared_lengths(rows: np.ndarray) -> np.ndarray:
    """The squared length of each row (any float dtype, shape `(n, d)`), float32 of shape `(n,)`."""
    lengths = np.empty(len(rows), dtype=np.float32)
    for begin in range(0, len(rows), _LENGTHS_AT_ONCE):
        some = rows[begin : begin + _LENGTHS_AT_ONCE].astype(np.float64)
        lengths[begin : begin + len(some)] = np.einsum("nd,nd->n", some, some)
    return lengths


class VectorIndex(ABC):
    """Finds the best of `vectors` (float32, `(n, d)`) for a query.

    The vectors, whose squared lengths are `lengths` (float32, `(n,)`), may be memory-mapped. A
    score is the inner product, or with the metric `"l2"` minus the squared distance. An exact
    search has `threads`, by default as many as torch."""

    search_threads = 1  # that a search keeps busy

    def __init__(
        self, vectors: np.ndarray, lengths: np.ndarray, metric: Metric, threads: int | None = None
    ) -> None:
        self.vectors = vectors
        self.metric = metric
        self._threads = threads
        self._longest = (float(lengths.max()) + UNDERFLOW) ** 0.5
        score_rows.compile()

    def score(self, query: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """The scores (float32, `(m,)`) of the vectors `ids` (int64, `(m,)`), not checked."""
        scores = np.empty(len(ids), np.float32)
        score_rows(self.vectors, ids, query, self.metric == "l2", scores)
        return scores

    @abstractmethod
    def search(self, queries: np.ndarray, k: int, ef_search: int = LEAST_WALKED) -> list[Retrieved]:
        """The `k` best vectors for each query (float32, `(q, d)`), or all if there are fewer.

        An approximate index takes at least `ef_search` candidates, and may find fewer."""


class FlatIndex(VectorIndex):
    """Scans an int8 copy of the vectors in several threads, then scores those that may be best.

    The first search makes the copy; it raises a FloatingPointError if vectors are not finite."""

    @cached_property
    def _int8_copy(self) -> Int8Copy:
        return Int8Copy(self.vectors, self.metric == "l2")

    @property
    def search_threads(self) -> int:  # type: ignore[override]
        return self._threads or torch.get_num_threads()

    def search(self, queries: np.ndarray, k: int, ef_search: int = LEAST_WALKED) -> list[Retrieved]:
        k = min(k, len(self.vectors))
        threads = min(self.search_threads, len(self.vectors))
        edges = np.linspace(0, len(self.vectors), threads + 1, dtype=np.int64)
        found = []
        with ThreadPoolExecutor(threads) as pool:
            for first in range(0, len(queries), _TOGETHER):
                some = queries[first : first + _TOGETHER]
                scan = partial(self._int8_copy.scan, some, k)
                scanned = pool.map(scan, edges[:-1], edges[1:])
                for query, *parts in zip(some, *scanned, strict=True):
                    found.append(self._best(query, parts, edges[:-1], k))
        return found

    def _best(
        self, query: np.ndarray, parts: Sequence[ApproximateScores], begins: np.ndarray, k: int
    ) -> Retrieved:
        """The `k` best vectors for a query (float32, `(d,)`), of parts that begin at `begins`."""
        ids = np.concatenate([a + part.best for a, part in zip(begins, parts, strict=True)])
        found = Retrieved.best(ids, self.score(query, ids), k)
        least = float(found.scores[-1])
        least -= self._rounding(query, least)
        ids = np.concatenate(
            [a + part.at_least(least) for a, part in zip(begins, parts, strict=True)]
        )
        return Retrieved.best(ids, self.score(query, ids), k)

    def _rounding(self, query: np.ndarray, score: float) -> float:
        """The largest error of a score that is at least `score`, for a query (float32, `(d,)`).

        A sum of d products in any order is off by at most d roundings of the sum of their absolute
        values, which is at most the product of both lengths."""
        length = float(np.linalg.norm(query.astype(np.float64)))
        roundings = 2 * (len(query) + 2) * UNIT_ROUNDOFF
        if self.metric == "inner_product":
            return roundings * length * self._longest + UNDERFLOW
        reach = length + max(-score, 0.0) ** 0.5  # the length of so near a vector is at most this
        return 2 * roundings * (reach**2 + length**2) + UNDERFLOW


class FaissFlatIndex(FlatIndex):
    """Scores all vectors with FAISS on GPUs, which hold copies of them (extra `gpu`).

    If more candidates are needed than FAISS finds, the CPU searches."""

    search_threads = 1

    def __init__(
        self, vectors: np.ndarray, lengths: np.ndarray, metric: Metric, threads: int | None = None
    ) -> None:
        super().__init__(vectors, lengths, metric, threads)
        faiss = require("faiss", "FaissFlatIndex", "retrieval")
        by = faiss.IndexFlatL2 if metric == "l2" else faiss.IndexFlatIP
        index = by(vectors.shape[1])
        self._index = index if faiss.get_num_gpus() == 0 else faiss.index_cpu_to_all_gpus(index)
        self._index.add(vectors)

    def search(self, queries: np.ndarray, k: int, ef_search: int = LEAST_WALKED) -> list[Retrieved]:
        k = min(k, len(self.vectors))
        return self._best_of(queries, k, k + max(k // 8, _SPARE))

    def _best_of(self, queries: np.ndarray, k: int, count: int) -> list[Retrieved]:
        """The best of `count` candidates for each query (float32, `(q, d)`), or of four times that.

        More are needed where `count` may lack a vector that is as good as the k-th."""
        if count > _MOST_CANDIDATES:
            return super().search(queries, k)
        all_scores, all_ids = self._index.search(queries, min(count, len(self.vectors)))
        found = []
        unsure = []
        for i, (query, ids) in enumerate(zip(queries, all_ids, strict=True)):
            best = Retrieved.best(ids, self.score(query, ids), k)
            found.append(best)
            bound = float(all_scores[i, -1])  # on the scores of all other vectors, as FAISS sums
            if self.metric == "l2":
                bound = -bound
            least = float(best.scores[-1])
            if count < len(self.vectors) and least <= bound + self._rounding(query, least):
                unsure.append(i)
        if unsure:
            again = self._best_of(queries[unsure], k, 4 * count)
            for i, best in zip(unsure, again, strict=True):
                found[i] = best
        return found


class HnswIndex(VectorIndex):
    """Walks a graph of near vectors (HNSW, arXiv 1603.09320), which is approximate and fast.

    The graph is built here with FAISS (extra `retrieval`), and holds a copy of the vectors."""

    def __init__(
        self, vectors: np.ndarray, lengths: np.ndarray, metric: Metric, threads: int | None = None
    ) -> None:
        super().__init__(vectors, lengths, metric, threads)
        self._faiss = faiss = require("faiss", 'index="hnsw"', "retrieval")
        by = faiss.METRIC_L2 if metric == "l2" else faiss.METRIC_INNER_PRODUCT
        self._graph = faiss.IndexHNSWFlat(vectors.shape[1], _LINKS, by)
        self._graph.add(vectors)

    def search(self, queries: np.ndarray, k: int, ef_search: int = LEAST_WALKED) -> list[Retrieved]:
        count = min(max(k, ef_search), len(self.vectors))
        parameters = self._faiss.SearchParametersHNSW(efSearch=count)
        _, candidates = self._graph.search(queries, count, params=parameters)
        found = []
        for query, ids in zip(queries, candidates, strict=True):
            reached = ids[ids >= 0]  # a disconnected graph does not reach all
            found.append(Retrieved.best(reached, self.score(query, reached), k))
        return found


def finds_gpus() -> bool:
    """True if FAISS is installed with support for GPUs and finds one."""
    try:
        return bool(require("faiss", "a GPU", "retrieval").get_num_gpus() > 0)
    except ImportError:
        return False


def index_type(index: Index) -> type[VectorIndex]:
    """The class of an exact index, on GPUs if FAISS finds some, or of an approximate one."""
    exact = FaissFlatIndex if finds_gpus() else FlatIndex
    types: dict[str, type[VectorIndex]] = {"flat": exact, "hnsw": HnswIndex}
    return types[index]
