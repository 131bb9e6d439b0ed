"""Scores of vectors: the same for a query and a vector, whatever else is scored in the call.

Speculation compares what a request cache ranks first with what a search finds, so that both must
score alike to the last bit. All exact scores come from one kernel, `score_rows`.
"""

# mypy: disallow-untyped-defs=False
# The types of a kernel's arguments are those of its numba signatures.

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal, TypeAlias

import numpy as np
from numba import njit

from ..index.kernels import kernel
from .retrieved import Retrieved

Metric: TypeAlias = Literal["inner_product", "l2"]

_LENGTHS_AT_ONCE = 1 << 16
# Queries that are scored together: a row is loaded once for all of them.
_TOGETHER = 4
# Sums may be reordered for vector instructions: the compiled order is the same for every row.
_vectorised = njit(fastmath={"reassoc", "contract", "nsz"}, nogil=True)


@_vectorised
def _inner_products(rows, row, queries, first):
    a = b = c = d = np.float32(0)
    for j in range(rows.shape[1]):
        number = rows[row, j]
        a += number * queries[first, j]
        b += number * queries[first + 1, j]
        c += number * queries[first + 2, j]
        d += number * queries[first + 3, j]
    return a, b, c, d


@_vectorised
def _squared_distances(rows, row, queries, first):
    a = b = c = d = np.float32(0)
    for j in range(rows.shape[1]):
        number = rows[row, j]
        difference = number - queries[first, j]
        a += difference * difference
        difference = number - queries[first + 1, j]
        b += difference * difference
        difference = number - queries[first + 2, j]
        c += difference * difference
        difference = number - queries[first + 3, j]
        d += difference * difference
    return a, b, c, d


@kernel(
    "void(float32[:, ::1], int64[::1], float32[:, ::1], boolean, float32[:, ::1])", drafts=False
)
def score_rows(rows, ids, queries, by_distance, scores):
    """Scores some rows for all queries.

    Args:
        rows (float32 of shape `(n, d)`): All rows.
        ids (int64 of shape `(m,)`): The rows to score; they are not checked.
        queries (float32 of shape `(q, d)`): A multiple of four.
        by_distance (bool): Minus the squared distance, else the inner product.
        scores (float32 of shape `(q, m)`): Receives the scores.
    """
    for i in range(len(ids)):
        for s in range(0, len(queries), _TOGETHER):
            if by_distance:
                a, b, c, d = _squared_distances(rows, ids[i], queries, s)
                a, b, c, d = -a, -b, -c, -d
            else:
                a, b, c, d = _inner_products(rows, ids[i], queries, s)
            scores[s, i], scores[s + 1, i], scores[s + 2, i], scores[s + 3, i] = a, b, c, d


def squared_lengths(rows: np.ndarray) -> np.ndarray:
    """The squared length of each row (any float dtype, shape `(n, d)`), float32 of shape `(n,)`."""
    lengths = np.empty(len(rows), dtype=np.float32)
    for begin in range(0, len(rows), _LENGTHS_AT_ONCE):
        some = rows[begin : begin + _LENGTHS_AT_ONCE].astype(np.float64)
        lengths[begin : begin + len(some)] = np.einsum("nd,nd->n", some, some)
    return lengths


class VectorIndex(ABC):
    """Vectors, float32 of shape `(n, d)`, among which the best for a query are found.

    They are not copied, and may be memory-mapped. A score is the inner product, or minus the
    squared distance.
    """

    def __init__(self, vectors: np.ndarray, metric: Metric) -> None:
        self.vectors = vectors
        self.metric = metric

    @abstractmethod
    def search(self, queries: np.ndarray, k: int) -> list[Retrieved]:
        """The `k` best vectors for each query (float32 of shape `(q, d)`), or all where there are
        fewer; an approximate index may find fewer."""

    def score(self, query: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """The scores (float32) of the vectors `ids` (int64, not checked) for one query."""
        return self.scores(query[None], ids)[0]

    def scores(self, queries: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """The same for several queries, float32 of shape `(q, m)`."""
        missing = -len(queries) % _TOGETHER
        padded = np.pad(queries, ((0, missing), (0, 0)))
        scores = np.empty((len(padded), len(ids)), np.float32)
        score_rows(self.vectors, ids, padded, self.metric == "l2", scores)
        return scores[: len(queries)]
