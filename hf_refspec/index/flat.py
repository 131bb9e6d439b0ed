"""Exact search: every vector is compared with every query of a batch.

FAISS's flat index takes a batch one query after another, or multiplies matrices whose shape does not
suit it: eight queries cost four to eight times as much as one. Here all queries are held against a
vector while it is at hand, and eight cost 1.4 times as much as one, which is what a verification of
speculated retrievals is about.
"""

# mypy: disallow-untyped-defs=False
# The types of a kernel's arguments are those of its numba signatures.

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import torch
from numba import njit

from .kernels import kernel
from .simd import products_of_tile, side_by_side
from .vector_index import Metric, VectorIndex, inner_product

# Queries of one scan: as many as stay in the fastest memory beside a vector.
_QUERIES_AT_ONCE = 32
# Rows whose products are taken before these are looked at, few enough to stay near, and a part of
# them that can be taken by sixes and by eights.
_BLOCK, _PART = 264, 24
_INFINITE = np.float32(np.inf)
# As many sums as a processor has registers for.
_eight_rows_with_8 = products_of_tile(8, 8)
_six_rows_with_16 = products_of_tile(6, 16)


class FlatIndex(VectorIndex):
    """Looks at all vectors, every thread of torch at a part of them: exact.

    Args:
        vectors, lengths, metric: See [`VectorIndex`].
    """

    def __init__(self, vectors: np.ndarray, lengths: np.ndarray, metric: Metric) -> None:
        super().__init__(vectors, lengths, metric, exact=True)
        # Without lengths, a distance is minus twice the product.
        self._lengths = lengths if metric == "l2" else np.zeros(len(vectors), dtype=np.float32)

    def candidates(self, queries: np.ndarray, count: int) -> list[tuple[np.ndarray, float]]:
        found = []
        for begin in range(0, len(queries), _QUERIES_AT_ONCE):
            some = queries[begin : begin + _QUERIES_AT_ONCE]
            nearest = scan_rows(self.vectors, self._lengths, some, count)
            for query, (ids, distance) in zip(some, nearest, strict=True):
                length = float(np.dot(query, query))
                score = -distance / 2 if self.metric == "inner_product" else -(distance + length)
                found.append((ids, score))
        return found


def scan_rows(
    rows: np.ndarray, lengths: np.ndarray, queries: np.ndarray, most: int
) -> list[tuple[np.ndarray, float]]:
    """Looks at all rows, every thread at a part of them; arguments as of [`scan`].

    Returns:
        For each query the ids of at least `most` rows (int64, unordered; fewer where there are no
        more), the nearest among them, and a bound that no other row's distance lies below.
    """
    edges = np.linspace(0, len(rows), min(torch.get_num_threads(), len(rows)) + 1, dtype=np.int64)

    def scan_part(part: slice) -> list[tuple[np.ndarray, float]]:
        return _scan_part(rows, lengths, queries, most, part)

    parts = [slice(*each) for each in pairwise(edges.tolist())]
    if len(parts) == 1:
        return scan_part(parts[0])
    with ThreadPoolExecutor(len(parts)) as threads:
        scanned = list(threads.map(scan_part, parts))
    return [
        (np.concatenate([ids for ids, _ in of_query]), min(bound for _, bound in of_query))
        for of_query in zip(*scanned, strict=True)
    ]


def _scan_part(
    rows: np.ndarray, lengths: np.ndarray, queries: np.ndarray, most: int, part: slice
) -> list[tuple[np.ndarray, float]]:
    most = min(most, part.stop - part.start)
    ids = np.empty((len(queries), 2 * most), dtype=np.int64)
    distances = np.empty(ids.shape, dtype=np.float32)
    counts = np.zeros(len(queries), dtype=np.int64)
    bounds = np.full(len(queries), _INFINITE)
    scan(rows[part], lengths[part], queries, ids, distances, counts, bounds)
    return [
        (part.start + some[:count], float(bound))
        for some, count, bound in zip(ids, counts, bounds, strict=True)
    ]


@kernel(
    "void(float32[:, ::1], float32[::1], float32[:, ::1], int64[:, ::1], float32[:, ::1], "
    "int64[::1], float32[::1])",
    drafts=False,
)
def scan(rows, lengths, queries, ids, distances, counts, bounds):
    """Finds the rows nearest to each query.

    Args:
        rows (float32 of shape `(n, d)`): What is searched.
        lengths (float32 of shape `(n,)`): The squared length of each row.
        queries (float32 of shape `(q, d)`): What is searched for.
        ids (int64 of shape `(q, 2 * most)`): Gets the rows in its first `most` columns, unordered.
        distances (float32 of shape `(q, 2 * most)`): Gets their squared distances, less the squared
            length of the query.
        counts (int64 of shape `(q,)`): 0 at first; gets how many were found.
        bounds (float32 of shape `(q,)`): Infinite at first; gets what the distance of no row that is
            not in `ids` lies below.
    """
    most = ids.shape[1] // 2
    width = 8 if len(queries) <= 8 else 16
    lanes = side_by_side(queries, width)
    block = np.empty((len(lanes), _BLOCK, width), dtype=np.float32)
    nearest = np.empty(width, dtype=np.float32)
    for begin in range(0, len(rows), _BLOCK):
        size = min(_BLOCK, len(rows) - begin)
        _multiply_block(rows, begin, size, queries, lanes, block)
        for group in range(len(lanes)):
            _to_distances(lengths[begin : begin + size], block[group], nearest)
            for s in range(group * width, min((group + 1) * width, len(queries))):
                if nearest[s % width] < bounds[s]:
                    of_query = block[group, :size, s % width]
                    bounds[s], counts[s] = _take_nearer(
                        of_query, begin, bounds[s], counts[s], ids[s], distances[s]
                    )
    for s in range(len(queries)):
        if counts[s] > most:
            bounds[s] = _keep_nearest(ids[s, : counts[s]], distances[s, : counts[s]], most)
            counts[s] = most


@njit(nogil=True)
def _multiply_block(rows, begin, size, queries, lanes, products):
    """Multiplies `size` rows from `begin` on with all queries, into `(groups, size, width)`."""
    width = lanes.shape[2]
    whole = size - size % _PART
    for r in range(0, whole, _PART):
        for group in range(len(lanes)):
            if width == 8:
                for some in range(r, r + _PART, 8):
                    _eight_rows_with_8(rows, begin + some, lanes[group], products[group], some)
            else:
                for some in range(r, r + _PART, 6):
                    _six_rows_with_16(rows, begin + some, lanes[group], products[group], some)
    for r in range(whole, size):
        for s in range(len(queries)):
            products[s // width, r, s % width] = inner_product(rows[begin + r], queries[s])


@njit(nogil=True)
def _to_distances(lengths, products, nearest):
    """Makes products, `(size, width)`, distances; the smallest of each query go into `nearest`."""
    nearest[:] = _INFINITE
    for r in range(len(lengths)):
        for s in range(len(nearest)):
            distance = lengths[r] - np.float32(2) * products[r, s]
            products[r, s] = distance
            nearest[s] = min(nearest[s], distance)


@njit(nogil=True)
def _take_nearer(new, begin, bound, count, ids, distances):
    """Adds the rows from `begin` on whose distance lies below the bound; whenever there are twice as
    many as wanted, the nearer half stays. Returns the new bound and count."""
    for r in range(len(new)):
        if new[r] < bound:
            ids[count], distances[count] = begin + r, new[r]
            count += 1
            if count == len(ids):
                count = len(ids) // 2
                bound = _keep_nearest(ids, distances, count)
    return bound, count


@njit(nogil=True)
def _keep_nearest(ids, distances, most):
    """Moves the `most` smallest distances to the front; returns the largest of them."""
    order = np.argpartition(distances, most - 1)[:most]
    ids[:most], distances[:most] = ids[order], distances[order]
    return distances[most - 1]
