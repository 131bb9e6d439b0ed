"""Exact search: every vector is compared with every query of a batch.

FAISS's flat index takes a batch one query after another, or multiplies matrices whose shape does
not suit it: eight queries cost four to eight times as much as one. Here all queries are held
against a vector while it is at hand, and eight cost 1.4 times as much as one: a verification of
speculated retrievals is such a batch.
"""

# mypy: disallow-untyped-defs=False
# The types of a kernel's arguments are those of its numba signatures.

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import torch
from numba import njit

from ..index.kernels import kernel
from .simd import scores_of_tile, side_by_side
from .vector_index import Metric, VectorIndex, inner_product

# Queries of one scan: as many as stay in the fastest memory beside a vector.
_QUERIES_AT_ONCE = 32
# Rows that are scored before their scores are looked at, few enough to stay near, and those of them
# that stay nearest while one group of queries after another is held against them.
_BLOCK, _PART, _TILE = 256, 32, 8
_LOWEST = np.float32(-np.inf)
_score_for_8_queries = scores_of_tile(_TILE, 8)
_score_for_16_queries = scores_of_tile(_TILE, 16)


class FlatIndex(VectorIndex):
    """Looks at all vectors, every thread of torch at a part of them: exact.

    Args:
        vectors, lengths, metric: See [`VectorIndex`].
    """

    def __init__(self, vectors: np.ndarray, lengths: np.ndarray, metric: Metric) -> None:
        super().__init__(vectors, lengths, metric, self._scan, exact=True)
        # Half of minus the squared distance is, but for the query's own length, such a sum.
        self._offsets = -lengths / 2 if metric == "l2" else np.zeros(len(vectors), np.float32)

    def _scan(self, queries: np.ndarray, count: int) -> list[tuple[np.ndarray, float]]:
        found = []
        for begin in range(0, len(queries), _QUERIES_AT_ONCE):
            some = queries[begin : begin + _QUERIES_AT_ONCE]
            found += scan_rows(self.vectors, self._offsets, some, count)
        if self.metric == "inner_product":
            return found
        return [
            (ids, 2 * bound - float(np.dot(query, query)))
            for query, (ids, bound) in zip(queries, found, strict=True)
        ]


def scan_rows(
    rows: np.ndarray, offsets: np.ndarray, queries: np.ndarray, most: int
) -> list[tuple[np.ndarray, float]]:
    """Looks at all rows, every thread at a part of them; arguments as of [`scan`].

    Returns:
        For each query the ids of at least `most` rows (int64, unordered; fewer where there are no
        more), those with the highest scores among them, and a bound that no other's score exceeds.
    """

    def scan_part(part: slice) -> list[tuple[np.ndarray, float]]:
        return _scan_part(rows, offsets, queries, most, part)

    edges = np.linspace(0, len(rows), min(torch.get_num_threads(), len(rows)) + 1, dtype=np.int64)
    parts = [slice(*each) for each in pairwise(edges.tolist())]
    if len(parts) == 1:
        return scan_part(parts[0])
    with ThreadPoolExecutor(len(parts)) as threads:
        scanned = list(threads.map(scan_part, parts))
    return [
        (np.concatenate([ids for ids, _ in of_query]), max(bound for _, bound in of_query))
        for of_query in zip(*scanned, strict=True)
    ]


def _scan_part(
    rows: np.ndarray, offsets: np.ndarray, queries: np.ndarray, most: int, part: slice
) -> list[tuple[np.ndarray, float]]:
    most = min(most, part.stop - part.start)
    ids = np.empty((len(queries), 2 * most), dtype=np.int64)
    scores = np.empty(ids.shape, dtype=np.float32)
    counts = np.zeros(len(queries), dtype=np.int64)
    bounds = np.full(len(queries), _LOWEST)
    scan(rows[part], offsets[part], queries, ids, scores, counts, bounds)
    return [
        (part.start + some[:count], float(bound))
        for some, count, bound in zip(ids, counts, bounds, strict=True)
    ]


@kernel(
    "void(float32[:, ::1], float32[::1], float32[:, ::1], int64[:, ::1], float32[:, ::1], "
    "int64[::1], float32[::1])",
    drafts=False,
)
def scan(rows, offsets, queries, ids, scores, counts, bounds):
    """Finds the rows whose offset plus inner product with a query is highest.

    Args:
        rows (float32 of shape `(n, d)`): What is searched.
        offsets (float32 of shape `(n,)`): One for each row.
        queries (float32 of shape `(q, d)`): What is searched for.
        ids (int64 of shape `(q, 2 * most)`): Gets the rows in its first `most` columns, unordered.
        scores (float32 of shape `(q, 2 * most)`): Gets their scores.
        counts (int64 of shape `(q,)`): 0 at first; gets how many were found.
        bounds (float32 of shape `(q,)`): Minus infinity at first; gets what the score of no row
            that is not in `ids` exceeds.
    """
    most = ids.shape[1] // 2
    width = 8 if len(queries) <= 8 else 16
    grouped = side_by_side(queries, width)
    block = np.empty((len(grouped), _BLOCK, width), dtype=np.float32)
    highest = np.empty((len(grouped), 1, width), dtype=np.float32)
    for begin in range(0, len(rows), _BLOCK):
        size = min(_BLOCK, len(rows) - begin)
        highest[:] = _LOWEST
        _score_block(rows, offsets, begin, size, queries, grouped, block, highest)
        for s in range(len(queries)):
            group, place = s // width, s % width
            if highest[group, 0, place] > bounds[s]:
                bounds[s], counts[s] = _take_better(
                    block[group, :size, place], begin, bounds[s], counts[s], ids[s], scores[s]
                )
    for s in range(len(queries)):
        if counts[s] > most:
            bounds[s] = _keep_best(ids[s, : counts[s]], scores[s, : counts[s]], most)
            counts[s] = most


@njit(nogil=True)
def _score_block(rows, offsets, begin, size, queries, grouped, block, highest):
    """Scores `size` rows from `begin` on for all queries, into `block`, `(groups, size, width)`;
    the highest score of each query goes into `highest`, `(groups, 1, width)`."""
    width = grouped.shape[2]
    # One query has nothing beside it to compute while its rows are loaded.
    whole = size - size % _PART if len(queries) > 1 else 0
    of_rows = offsets.reshape(1, -1)
    for part in range(0, whole, _PART):
        for g in range(len(grouped)):
            some, scores, best = grouped[g], block[g], highest[g]
            for r in range(part, part + _PART, _TILE):
                if width == 8:
                    _score_for_8_queries(rows, of_rows, begin + r, some, scores, r, best)
                else:
                    _score_for_16_queries(rows, of_rows, begin + r, some, scores, r, best)
    for r in range(whole, size):
        for s in range(len(queries)):
            score = offsets[begin + r] + inner_product(rows[begin + r], queries[s])
            g, place = s // width, s % width
            block[g, r, place] = score
            highest[g, 0, place] = max(highest[g, 0, place], score)


@njit(nogil=True)
def _take_better(new, begin, bound, count, ids, scores):
    """Adds the rows from `begin` on whose score exceeds the bound; whenever there are twice as many
    as wanted, the better half stays. Returns the new bound and count."""
    for r in range(len(new)):
        if new[r] > bound:
            ids[count], scores[count] = begin + r, new[r]
            count += 1
            if count == len(ids):
                count = len(ids) // 2
                bound = _keep_best(ids, scores, count)
    return bound, count


@njit(nogil=True)
def _keep_best(ids, scores, most):
    """Moves the `most` highest scores to the front; returns the lowest of them."""
    order = np.argpartition(scores, len(scores) - most)[len(scores) - most :]
    ids[:most], scores[:most] = ids[order], scores[order]
    return scores[0]
