"""Exact search, which compares every vector with every query of a batch.

Memory bounds its speed. A scan of an int8 copy, a quarter of the vectors' size, finds the few that
may be among the best, and only those are read in full.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch
from numba import njit

from ..kernels.kernel import kernel
from .retriever import Retrieved
from .vector_index import (
    LEAST_WALKED,
    UNDERFLOW,
    UNIT_ROUNDOFF,
    HnswIndex,
    Index,
    Metric,
    VectorIndex,
    import_faiss,
    vectorised,
)

_TOGETHER = 4  # queries of a scan, whose approximate scores are all in memory
# Beyond k, the fewest candidates that FAISS finds: they may be as good as the k-th.
_SPARE = 16
_MOST_CANDIDATES = 2048  # that FAISS finds for a query on a GPU
_INT8 = 127
_INT16 = 2**15 - 1
_INT32 = 2**31 - 1
_BLOCK = 32  # rows that stay in a core's cache until all queries have been multiplied with them
_ROUNDINGS = 8  # of a score that is computed from a sum of integers, at most


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
        faiss = import_faiss("FaissFlatIndex")
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


def finds_gpus() -> bool:
    """True if FAISS is installed with support for GPUs and finds one."""
    try:
        return bool(import_faiss("a GPU").get_num_gpus() > 0)
    except ImportError:
        return False


def index_type(index: Index) -> type[FlatIndex | HnswIndex]:
    """The class of an exact index, on GPUs if FAISS finds some, or of an approximate one."""
    exact: type[FlatIndex] = FaissFlatIndex if finds_gpus() else FlatIndex
    types: dict[str, type[FlatIndex | HnswIndex]] = {"flat": exact, "hnsw": HnswIndex}
    return types[index]


@dataclass(frozen=True, slots=True, eq=False)
class ApproximateScores:
    """The scores of vectors for one query, as an int8 copy has them.

    Attributes:
        scores (`np.ndarray`, float32 of shape `(n,)`): All scores, less `offset`.
        best (`np.ndarray`, int64 of shape `(k,)`): The vectors with the highest scores, unordered.
        offset (`float`): The part of a score that does not depend on the vector.
        error (`float`): The largest difference from a true score.
    """

    scores: np.ndarray
    best: np.ndarray
    offset: float
    error: float

    def at_least(self, score: float) -> np.ndarray:
        """All vectors (int64) whose true score may be `score` or more."""
        least = np.float32(score - self.offset - self.error)
        return np.flatnonzero(self.scores >= np.nextafter(least, np.float32(-np.inf)))


class Int8Copy:
    """Vectors whose numbers are rounded to 255 steps between the extremes of their column.

    Args:
        vectors (`np.ndarray`, float32 of shape `(n, d)`): The vectors.
        by_distance (`bool`): Whether a score is minus the squared distance from the query, instead
            of the inner product with it.

    Raises:
        FloatingPointError: If a vector is not finite, or too long for its squared length.
    """

    def __init__(self, vectors: np.ndarray, by_distance: bool) -> None:
        round_rows.compile()
        self._by_distance = by_distance
        low = vectors.min(axis=0).astype(np.float64)
        high = vectors.max(axis=0).astype(np.float64)
        self._centre = (low + high) / 2
        with np.errstate(invalid="ignore"):  # infinity is refused below
            self._steps = (high - low) / (2 * _INT8)
        self._rows = np.empty(vectors.shape, np.int8)
        self._lengths = np.empty(len(vectors), np.float32)  # squared, from the centre
        lost = round_rows(vectors, self._centre, self._steps, self._rows, self._lengths)
        self._most_lost = lost**0.5
        self._longest = float(self._lengths.max()) ** 0.5
        if not np.isfinite(self._longest):
            raise FloatingPointError("the vectors have NaN, infinity or too large numbers")

    def scan(self, queries: np.ndarray, k: int, begin: int, end: int) -> list[ApproximateScores]:
        """Scores the vectors from `begin`, with id 0, to `end` for queries (float32, `(q, d)`)."""
        centred = queries.astype(np.float64)
        if self._by_distance:
            centred -= self._centre
            offsets = -np.einsum("qd,qd->q", centred, centred)
            factor = 2.0  # minus the distance is 2 xy - xx - yy
        else:
            offsets = centred @ self._centre
            factor = 1.0
        # The product with a row: int16 weights times int8 numbers, in units of the query.
        weights = centred * self._steps
        dimension = len(self._steps)
        units = np.maximum(
            np.abs(weights).max(axis=1) / _INT16,
            np.abs(weights).sum(axis=1) / (_INT32 / _INT8 - dimension),
        )
        units[units == 0] = 1
        rounded = np.rint(weights / units[:, None])
        lost = np.linalg.norm(weights - rounded * units[:, None], axis=1)
        lengths = np.linalg.norm(centred, axis=1)
        errors = factor * (self._most_lost * lengths + _INT8 * dimension**0.5 * lost)
        errors += _ROUNDINGS * UNIT_ROUNDOFF * (self._longest + lengths) ** 2 + UNDERFLOW
        scores = np.empty((len(queries), end - begin), np.float32)
        best = np.empty((len(queries), 2 * k), np.int64)
        counts = np.zeros(len(queries), np.int64)
        scan_rows(
            self._rows[begin:end],
            self._lengths[begin:end],
            self._by_distance,
            rounded.astype(np.int16),
            (factor * units).astype(np.float32),
            scores,
            best,
            counts,
        )
        return [
            ApproximateScores(scores[i], best[i, : counts[i]], float(offsets[i]), float(errors[i]))
            for i in range(len(queries))
        ]


@kernel(
    "float64(float32[:, ::1], float64[::1], float64[::1], int8[:, ::1], float32[::1])", drafts=False
)
def round_rows(rows, centre, steps, rounded, lengths):
    """Rounds the rows (n, d) to `centre + steps * rounded` (d,); returns the largest squared error.

    Writes their squared distances from the centre into `lengths` (n,)."""
    inverse = np.zeros_like(steps)
    for j in range(len(steps)):
        if steps[j] > 0:
            inverse[j] = 1 / steps[j]
    most = 0.0
    for i in range(len(rows)):
        lost, lengths[i] = _round_row(rows[i], centre, steps, inverse, rounded[i])
        most = max(most, lost)
    return most


@vectorised
def _round_row(row, centre, steps, inverse, rounded):
    """Rounds a row (d,); returns its squared distances from `rounded` (d,) and from the centre."""
    lost = length = 0.0
    for j in range(len(row)):
        number = row[j] - centre[j]
        nearest = np.rint(number * inverse[j])
        rounded[j] = np.int8(nearest)
        difference = number - nearest * steps[j]
        lost += difference * difference
        length += number * number
    return lost, length


@kernel(
    "void(int8[:, ::1], float32[::1], boolean, int16[:, ::1], float32[::1], float32[:, ::1], "
    "int64[:, ::1], int64[::1])",
    drafts=False,
)
def scan_rows(rows, lengths, by_distance, queries, units, scores, best, counts):
    """Writes the products of rows (n, d) and queries (q, d), times `units` (q,), into `scores`.

    With `by_distance` the squared lengths of the rows are subtracted. The first `counts` (q,)
    columns of `best` (q, 2 * k), at most k, receive the rows with the highest scores, unordered."""
    k = best.shape[1] // 2
    bounds = np.full(len(queries), -np.inf, np.float32)
    best_scores = np.empty(best.shape, np.float32)
    for begin in range(0, len(rows), _BLOCK):
        end = min(begin + _BLOCK, len(rows))
        for s in range(len(queries)):
            query = queries[s]
            for i in range(begin, end):
                score = units[s] * np.float32(_product(rows[i], query))
                if by_distance:
                    score -= lengths[i]
                scores[s, i] = score
                if score > bounds[s]:
                    best[s, counts[s]] = i
                    best_scores[s, counts[s]] = score
                    counts[s] += 1
                    if counts[s] == 2 * k:
                        bounds[s] = _keep_best(best[s], best_scores[s], k)
                        counts[s] = k
    for s in range(len(queries)):
        if counts[s] > k:
            _keep_best(best[s, : counts[s]], best_scores[s, : counts[s]], k)
            counts[s] = k


@njit(nogil=True)
def _product(row, query):
    """The inner product of integers (d,), in 32 bits: vector instructions add pairs of int16."""
    total = np.int32(0)
    for j in range(len(row)):
        total = np.int32(total + np.int32(row[j]) * np.int32(query[j]))
    return total


@njit(nogil=True)
def _keep_best(ids, scores, k):
    """Moves the `k` highest scores (n,) and their ids (n,) to the front; returns the lowest."""
    order = np.argpartition(scores, len(scores) - k)[len(scores) - k :]
    ids[:k], scores[:k] = ids[order], scores[order]
    return scores[0]
