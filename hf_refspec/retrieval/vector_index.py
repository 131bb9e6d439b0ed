"""Search among vectors in two stages, so that what a query finds never depends on its batch.

An index finds candidates, fast and with rounding errors that depend on what is searched for beside
a query. They are then scored one at a time from the vectors themselves, so that a search and a
request cache give the same scores in the same order.
"""

# mypy: disallow-untyped-defs=False
# The types of a kernel's arguments are those of its numba signatures.

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

import numpy as np
from numba import njit

from ..index.kernels import kernel
from .retrieved import Retrieved
from .simd import fetch_ahead

Metric: TypeAlias = Literal["inner_product", "l2"]

# Candidates that an approximate index walks at least: which of them it finds must not depend on how
# many are wanted, for a request cache wants more than a step.
LEAST_WALKED = 128
# Candidates beyond k that an exact search takes at least: so many may be as good as the k-th.
_SPARE = 16
_UNIT_ROUNDOFF = 2.0**-24
_LENGTHS_AT_ONCE = 1 << 16
# How many rows ahead of their use scattered ones are asked for, and the numbers of a cache line.
_ROWS_AHEAD, _CACHE_LINE = 8, 16
# A sum may be taken in another order, so that it can be vectorised, but always in the same one.
_vectorised = njit(fastmath={"reassoc", "contract", "nsz"}, nogil=True)


@_vectorised
def inner_product(row, query):
    total = np.float32(0)
    for j in range(len(query)):
        total += row[j] * query[j]
    return total


@_vectorised
def _squared_distance(row, query):
    total = np.float32(0)
    for j in range(len(query)):
        difference = row[j] - query[j]
        total += difference * difference
    return total


@kernel("void(float32[:, ::1], int64[::1], float32[::1], boolean, float32[::1])", drafts=False)
def score_rows(rows, ids, query, by_distance, scores):
    """Scores some rows, each the same whatever is scored beside it.

    Args:
        rows (float32 of shape `(n, d)`): All rows.
        ids (int64 of shape `(m,)`): Which of them; they are not checked.
        query (float32 of shape `(d,)`): The query.
        by_distance (bool): Minus the squared distance, else the inner product.
        scores (float32 of shape `(m,)`): Gets the scores.
    """
    for i in range(len(ids)):
        if i + _ROWS_AHEAD < len(ids):
            for j in range(0, rows.shape[1], _CACHE_LINE):
                fetch_ahead(rows, ids[i + _ROWS_AHEAD], j)
        if by_distance:
            scores[i] = -_squared_distance(rows[ids[i]], query)
        else:
            scores[i] = inner_product(rows[ids[i]], query)


def squared_lengths(rows: np.ndarray) -> np.ndarray:
    """The squared length of each row (any float dtype, shape `(n, d)`), float32 of shape `(n,)`."""
    lengths = np.empty(len(rows), dtype=np.float32)
    for begin in range(0, len(rows), _LENGTHS_AT_ONCE):
        some = rows[begin : begin + _LENGTHS_AT_ONCE].astype(np.float64)
        lengths[begin : begin + len(some)] = np.einsum("nd,nd->n", some, some)
    return lengths


class VectorIndex:
    """Vectors of which the best for a query are found.

    Args:
        vectors (`np.ndarray`, float32 of shape `(n, d)`): What is searched. They are not copied:
            they can be mapped into memory.
        lengths (`np.ndarray`, float32 of shape `(n,)`): Their squared lengths.
        metric (`"inner_product"` or `"l2"`): What a score is: the inner product, or minus the
            squared distance.
        candidates (callable): Finds candidates, given queries (float32 of shape `(q, d)`) and how
            many for each. It returns, for each query, ids (int64 of shape `(count,)`; more, or
            fewer, in any order), and how high the score of a vector that is not among them can be,
            as it computes scores.
        exact (`bool`): Whether a search returns the best of all vectors, or of its candidates.
        most_candidates (`int`, *optional*): The most that `candidates` finds for a query.
    """

    def __init__(
        self,
        vectors: np.ndarray,
        lengths: np.ndarray,
        metric: Metric,
        candidates: Callable[[np.ndarray, int], list[tuple[np.ndarray, float]]],
        exact: bool,
        most_candidates: int | None = None,
    ) -> None:
        self.vectors = vectors
        self.metric = metric
        self._candidates = candidates
        self._exact = exact
        self._most_candidates = min(most_candidates or len(vectors), len(vectors))
        self._longest = float(lengths.max()) ** 0.5

    def score(self, query: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """The scores of some vectors (ids, int64 of shape `(m,)`; they are not checked), float32 of
        shape `(m,)`."""
        scores = np.empty(len(ids), dtype=np.float32)
        score_rows(self.vectors, ids, query, self.metric == "l2", scores)
        return scores

    def search(self, queries: np.ndarray, k: int) -> list[Retrieved]:
        """The `k` best vectors for each query (float32 of shape `(q, d)`), or all where there are
        fewer; an approximate index may find fewer."""
        k = min(k, len(self.vectors))
        if self._exact:
            return self._exact_search(queries, k, k + max(k // 8, _SPARE))
        return [found for found, _ in self._best_candidates(queries, k, max(k, LEAST_WALKED))]

    def _best_candidates(
        self, queries: np.ndarray, k: int, count: int
    ) -> list[tuple[Retrieved, float]]:
        """For each query the best of `count` candidates, and what no other vector exceeds."""
        candidates = self._candidates(queries, min(count, self._most_candidates))
        return [
            (Retrieved.best(ids, self.score(query, ids), k), bound)
            for query, (ids, bound) in zip(queries, candidates, strict=True)
        ]

    def _exact_search(self, queries: np.ndarray, k: int, count: int) -> list[Retrieved]:
        """Takes `count` candidates, and four times as many for those queries for which a vector
        that is as good as the k-th may be missing."""
        best = self._best_candidates(queries, k, count)
        found = [each for each, _ in best]
        if count >= self._most_candidates:
            return found
        unsure = [
            i
            for i, (query, (each, bound)) in enumerate(zip(queries, best, strict=True))
            if len(each) < k  # where vectors are not finite
            or each.scores[k - 1] <= bound + self._rounding(query, float(each.scores[k - 1]))
        ]
        if unsure:
            again = self._exact_search(queries[unsure], k, 4 * count)
            for i, each in zip(unsure, again, strict=True):
                found[i] = each
        return found

    def _rounding(self, query: np.ndarray, score: float) -> float:
        """How far apart the index's and our score of a vector can be that is as good as this one.

        A sum of d products in any order is off by at most d roundings of the sum of their absolute
        values, and thus of the product of both lengths.
        """
        length = float(np.linalg.norm(query.astype(np.float64)))
        roundings = 2 * (len(query) + 2) * _UNIT_ROUNDOFF
        if self.metric == "inner_product":
            return roundings * length * self._longest
        reach = length + max(-score, 0.0) ** 0.5  # a vector that is as near is no longer
        return 2 * roundings * (reach**2 + length**2)
