"""An int8 copy of vectors, whose scan finds the few that may be among the best.

Memory bounds the speed of an exact search: a copy is a quarter of the vectors' size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numba import njit

from ..kernels.kernel import kernel

UNIT_ROUNDOFF = 2.0**-24  # of float32
# More than a score may lose where its float32 numbers are too small to be rounded relatively: each
# operation loses at most 2 ** -126, even if denormal numbers count as 0
# (`torch.set_flush_denormal`), and an int8 copy multiplies that by an int32.
UNDERFLOW = 2.0**-90
_INT8 = 127
_INT16 = 2**15 - 1
_INT32 = 2**31 - 1
_BLOCK = 32  # rows that stay in a core's cache until all queries have been multiplied with them
_ROUNDINGS = 8  # of a score that is computed from a sum of integers, at most
# Sums may be reordered for vector instructions; the compiled order is the same for every row.
vectorised = njit(fastmath={"reassoc", "contract", "nsz"}, nogil=True)


@dataclass(frozen=True, slots=True, eq=False)
class ApproximateScores:
    """The scores of vectors for one query, as an int8 copy has them."""

    scores: np.ndarray  # float32, (n,), less `offset`
    best: np.ndarray  # int64, (k,), the vectors with the highest scores, unordered
    offset: float  # the part of a score that does not depend on the vector
    error: float  # the largest difference from a true score

    def at_least(self, score: float) -> np.ndarray:
        """All vectors (int64) whose true score may be `score` or more."""
        least = np.float32(score - self.offset - self.error)
        return np.flatnonzero(self.scores >= np.nextafter(least, np.float32(-np.inf)))


class Int8Copy:
    """Vectors (float32, `(n, d)`), rounded to 255 steps between the extremes of their column.

    A score is the inner product with a query or, `by_distance`, minus the squared distance from it.
    Raises a FloatingPointError if a vector is not finite, or too long for its squared length."""

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
