"""Search among vectors in two stages: an index finds candidates, and `score_rows` ranks them.

An index may round in its own way, which can depend on the batch. Speculation compares what a
request cache ranks first with what a search finds, so both must score alike to the last bit,
whatever else is in the batch: all final scores come from one kernel.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Literal, TypeAlias

import numpy as np
from numba import njit

from ..kernels.kernel import kernel
from ..messages import require
from .retriever import Retrieved

Metric: TypeAlias = Literal["inner_product", "l2"]
# How a retriever or a kNN datastore searches: exactly or approximately.
Index: TypeAlias = Literal["flat", "hnsw"]
_LINKS = 32  # of each vector in the graph

# The fewest candidates of an approximate search: what it finds must not depend on how many are
# wanted, since a request cache wants more than a step does.
LEAST_WALKED = 128
_LENGTHS_AT_ONCE = 1 << 16
UNIT_ROUNDOFF = 2.0**-24  # of float32
# More than a score may lose where its float32 numbers are too small to be rounded relatively: each
# operation loses at most 2 ** -126, even if denormal numbers count as 0
# (`torch.set_flush_denormal`), and an int8 copy multiplies that by an int32.
UNDERFLOW = 2.0**-90
# Sums may be reordered for vector instructions; the compiled order is the same for every row.
vectorised = njit(fastmath={"reassoc", "contract", "nsz"}, nogil=True)


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
    """Finds the best vectors for a query.

    The vectors are not copied, and may be memory-mapped.

    Args:
        vectors (`np.ndarray`, float32 of shape `(n, d)`): The vectors to search.
        lengths (`np.ndarray`, float32 of shape `(n,)`): Their squared lengths.
        metric (`"inner_product"` or `"l2"`): A score is the inner product, or minus the squared
            distance.
        threads (`int`, *optional*): Threads of an exact search; torch's number by default.
    """

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


class HnswIndex(VectorIndex):
    """Walks a graph of near vectors (HNSW, arXiv 1603.09320), which is approximate and fast.

    The graph is built here with FAISS (extra `retrieval`), and holds a copy of the vectors."""

    def __init__(
        self, vectors: np.ndarray, lengths: np.ndarray, metric: Metric, threads: int | None = None
    ) -> None:
        super().__init__(vectors, lengths, metric, threads)
        self._faiss = faiss = import_faiss('index="hnsw"')
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


def import_faiss(what: str) -> Any:
    """Imports FAISS, which `what` needs."""
    return require("faiss", what, "retrieval")
