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
# Sums may be reordered for vector instructions: the compiled order is the same for every row.
vectorised = njit(fastmath={"reassoc", "contract", "nsz"}, nogil=True)


@vectorised
def score_row(rows, row, query, by_distance):
    """Minus the squared distance from a query, or the inner product with it."""
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
    """Scores some rows.

    Args:
        rows (float32 of shape `(n, d)`): All rows.
        ids (int64 of shape `(m,)`): The rows to score; they are not checked.
        query (float32 of shape `(d,)`): The query.
        by_distance (bool): Minus the squared distance, else the inner product.
        scores (float32 of shape `(m,)`): Receives the scores.
    """
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
        """The scores (float32) of the vectors `ids` (int64, not checked) for a query."""
        scores = np.empty(len(ids), np.float32)
        score_rows(self.vectors, ids, query, self.metric == "l2", scores)
        return scores
