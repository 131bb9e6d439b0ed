"""Nearest rows of a matrix by squared distance: all of them looked at, or a graph walked.

A search first finds candidates, fast and with rounding errors that depend on what is asked beside
it. They are then scored one by one by `squared_distances`, so that what is found for a query, and
with which distances, does not depend on the batch.
"""

# mypy: disallow-untyped-defs=False
# The types of a kernel's arguments are those of its numba signatures.

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numba import njit

from .kernels import kernel
from .lanes import (
    LANES,
    add_products,
    fetch_ahead,
    first_lanes,
    join_lanes,
    lanes_of,
    load_lanes,
    second_lanes,
    side_by_side,
    smaller_lanes,
    store_lanes,
)
from .retrieved import Retrieved

# Rows that a graph search looks for at least: which of them it finds must not depend on how many
# of the best are wanted, as a cache wants more than a step.
LEAST_WALKED = 128
LINKS = 32
# Queries of one scan: as many as stay in the fastest memory beside a row.
QUERIES_AT_ONCE = 32
# Candidates beyond k that an exact search takes: so many may be as good as the k-th.
SPARE = 16
UNIT_ROUNDOFF = 2.0**-24
# Rows whose products are taken before these are looked at, few enough to stay near, and a part of
# them that can be taken by sixes and by eights.
_BLOCK, _TILE = 264, 24
_INFINITE = np.float32(np.inf)
# How many rows ahead of their use they are asked for: in a scan, and of scattered ones.
_AHEAD, _ROWS_AHEAD = 64, 8
_CACHE_LINE = 16  # numbers that come together
# A sum may be taken in another order, so that it can be vectorised.
_fast = njit(fastmath={"reassoc", "contract", "nsz"}, nogil=True)


@_fast
def _dot(row, query):
    dot = np.float32(0)
    for j in range(len(query)):
        dot += row[j] * query[j]
    return dot


@njit(nogil=True)
def _eight_rows_with_eight(rows, i, queries, dots, r):
    """Of rows from `i` on with queries that lie side by side, `(d, 8)`; into `dots` from `r` on."""
    a = b = c = d = e = f = g = h = lanes_of(np.float32(0))
    for j in range(rows.shape[1]):
        fetch_ahead(rows, i + _AHEAD, 8 * j)
        some = load_lanes(queries, j)
        a = add_products(a, rows[i, j], some)
        b = add_products(b, rows[i + 1, j], some)
        c = add_products(c, rows[i + 2, j], some)
        d = add_products(d, rows[i + 3, j], some)
        e = add_products(e, rows[i + 4, j], some)
        f = add_products(f, rows[i + 5, j], some)
        g = add_products(g, rows[i + 6, j], some)
        h = add_products(h, rows[i + 7, j], some)
    store_lanes(dots, r, a)
    store_lanes(dots, r + 1, b)
    store_lanes(dots, r + 2, c)
    store_lanes(dots, r + 3, d)
    store_lanes(dots, r + 4, e)
    store_lanes(dots, r + 5, f)
    store_lanes(dots, r + 6, g)
    store_lanes(dots, r + 7, h)


@njit(nogil=True)
def _six_rows_with_sixteen(rows, i, queries, dots, r):
    """The same with two times eight queries, `(2, d, 8)`: fewer numbers are loaded."""
    first, second = queries[0], queries[1]
    zeros = lanes_of(np.float32(0))
    a = b = c = d = e = f = join_lanes(zeros, zeros)
    for j in range(rows.shape[1]):
        fetch_ahead(rows, i + _AHEAD, 6 * j)
        some = join_lanes(load_lanes(first, j), load_lanes(second, j))
        a = add_products(a, rows[i, j], some)
        b = add_products(b, rows[i + 1, j], some)
        c = add_products(c, rows[i + 2, j], some)
        d = add_products(d, rows[i + 3, j], some)
        e = add_products(e, rows[i + 4, j], some)
        f = add_products(f, rows[i + 5, j], some)
    _store_sixteen(dots, r, a)
    _store_sixteen(dots, r + 1, b)
    _store_sixteen(dots, r + 2, c)
    _store_sixteen(dots, r + 3, d)
    _store_sixteen(dots, r + 4, e)
    _store_sixteen(dots, r + 5, f)


@njit(nogil=True)
def _store_sixteen(dots, r, sums):
    store_lanes(dots[0], r, first_lanes(sums))
    store_lanes(dots[1], r, second_lanes(sums))


@njit(nogil=True)
def _dots_of_block(rows, begin, size, queries, lanes, dots):
    """Of `size` rows from `begin` on with all queries, into `dots`, `(groups, size, 8)`."""
    groups = len(lanes)
    # One query has nothing beside it to compute while its rows are loaded.
    together = size - size % _TILE if len(queries) > 1 else 0
    for r in range(0, together, _TILE):
        for group in range(0, groups - 1, 2):
            for some in range(r, r + _TILE, 6):
                two = slice(group, group + 2)
                _six_rows_with_sixteen(rows, begin + some, lanes[two], dots[two], some)
        if groups % 2:
            for some in range(r, r + _TILE, 8):
                _eight_rows_with_eight(
                    rows, begin + some, lanes[groups - 1], dots[groups - 1], some
                )
    for r in range(together, size):
        for s in range(len(queries)):
            dots[s // LANES, r, s % LANES] = _dot(rows[begin + r], queries[s])


@njit(nogil=True)
def _to_distances(norms, dots, nearest):
    """Makes products, `(size, 8)`, distances; the smallest for each query go into `nearest`."""
    smallest = lanes_of(_INFINITE)
    for r in range(len(norms)):
        distances = add_products(lanes_of(norms[r]), np.float32(-2), load_lanes(dots, r))
        store_lanes(dots, r, distances)
        smallest = smaller_lanes(smallest, distances)
    store_lanes(nearest, 0, smallest)


@njit
def _keep_best(ids, distances, most):
    """Moves the `most` smallest distances to the front; returns the largest of them."""
    largest = np.partition(distances, most - 1)[most - 1]
    kept = 0
    for wants_ties in (False, True):
        for at in range(kept, len(distances)):
            fits = distances[at] == largest if wants_ties else distances[at] < largest
            if fits and kept < most:
                distances[kept], distances[at] = distances[at], distances[kept]
                ids[kept], ids[at] = ids[at], ids[kept]
                kept += 1
    return largest


@kernel(
    "void(float32[:, ::1], float32[::1], float32[:, ::1], int64[:, ::1], float32[:, ::1], "
    "int64[::1], float32[::1])",
    drafts=False,
)
def scan(rows, norms, queries, ids, distances, counts, largest):
    """Finds the rows nearest to each query.

    Args:
        rows (float32 of shape `(n, d)`): What is searched.
        norms (float32 of shape `(n,)`): The squared length of each row.
        queries (float32 of shape `(q, d)`): What is searched for.
        ids (int64 of shape `(q, 2 * most)`): Gets the rows in its first `most` columns, unordered.
        distances (float32 of shape `(q, 2 * most)`): Gets their squared distances, less the squared
            length of the query.
        counts (int64 of shape `(q,)`): 0 at first; gets how many were found.
        largest (float32 of shape `(q,)`): Infinite at first; gets a bound that no row that is not
            in `ids` lies below.
    """
    most = ids.shape[1] // 2
    lanes = side_by_side(queries)
    block = np.empty((len(lanes), _BLOCK, LANES), dtype=np.float32)
    nearest = np.empty((len(lanes), 1, LANES), dtype=np.float32)
    for begin in range(0, len(rows), _BLOCK):
        size = min(_BLOCK, len(rows) - begin)
        _dots_of_block(rows, begin, size, queries, lanes, block)
        for group in range(len(lanes)):
            _to_distances(norms[begin : begin + size], block[group], nearest[group])
        for s in range(len(queries)):
            group, lane = s // LANES, s % LANES
            bound, count = largest[s], counts[s]
            if nearest[group, 0, lane] >= bound:
                continue
            for r in range(size):
                distance = block[group, r, lane]
                if distance < bound:
                    ids[s, count] = begin + r
                    distances[s, count] = distance
                    count += 1
                    if count == 2 * most:
                        bound, count = _keep_best(ids[s], distances[s], most), most
            largest[s], counts[s] = bound, count
    for s in range(len(queries)):
        if counts[s] > most:
            count = counts[s]
            largest[s] = _keep_best(ids[s, :count], distances[s, :count], most)
            counts[s] = most


def scan_rows(
    rows: np.ndarray, norms: np.ndarray, queries: np.ndarray, most: int
) -> list[tuple[np.ndarray, float]]:
    """Looks at all rows, every thread at a part of them; arguments as of [`scan`].

    Returns:
        For each query the ids of at least `most` rows (int64, unordered; fewer where there are no
        more), the nearest among them, and a bound that no other row lies below.
    """
    edges = np.linspace(0, len(rows), min(torch.get_num_threads(), len(rows)) + 1, dtype=np.int64)
    parts = [slice(*each) for each in pairwise(edges.tolist())]
    if len(parts) == 1:
        scanned = [_scan_part(rows, norms, queries, most, parts[0])]
    else:
        with ThreadPoolExecutor(len(parts)) as threads:
            scanned = list(
                threads.map(lambda part: _scan_part(rows, norms, queries, most, part), parts)
            )
    found = [
        (np.concatenate([ids for ids, _ in of_query]), min(bound for _, bound in of_query))
        for of_query in zip(*scanned, strict=True)
    ]
    return found


def _scan_part(
    rows: np.ndarray, norms: np.ndarray, queries: np.ndarray, most: int, part: slice
) -> list[tuple[np.ndarray, float]]:
    most = min(most, part.stop - part.start)
    ids = np.empty((len(queries), 2 * most), dtype=np.int64)
    distances = np.empty(ids.shape, dtype=np.float32)
    counts = np.zeros(len(queries), dtype=np.int64)
    largest = np.full(len(queries), _INFINITE)
    scan(rows[part], norms[part], queries, ids, distances, counts, largest)
    return [
        (part.start + some[:count], float(bound))
        for some, count, bound in zip(ids, counts, largest, strict=True)
    ]


@_fast
def _squared_distance(row, query):
    total = np.float32(0)
    for j in range(len(query)):
        difference = row[j] - query[j]
        total += difference * difference
    return total


@njit(nogil=True)
def fetch_row_ahead(rows, ids, i):
    """Has the row of an id that comes up soon after `ids[i]` brought near."""
    if i + _ROWS_AHEAD < len(ids):
        for j in range(0, rows.shape[1], _CACHE_LINE):
            fetch_ahead(rows, ids[i + _ROWS_AHEAD], j)


@kernel("void(float32[:, ::1], int64[::1], float32[::1], float32[::1])", drafts=False)
def squared_distances(rows, ids, query, distances):
    """The squared distance of each row of `ids` from a query, the same whatever is asked with it.

    Args:
        rows (float32 of shape `(n, d)`): All rows.
        ids (int64 of shape `(m,)`): Which of them; they are not checked.
        query (float32 of shape `(d,)`): The query.
        distances (float32 of shape `(m,)`): Gets the distances.
    """
    for i in range(len(ids)):
        fetch_row_ahead(rows, ids, i)
        distances[i] = _squared_distance(rows[ids[i]], query)


class Rows:
    """Rows that can be scored by their ids.

    Args:
        rows (`np.ndarray`, float32 of shape `(n, d)`): The rows.
    """

    def __init__(self, rows: np.ndarray) -> None:
        self.rows = rows

    def score(self, query: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """Minus the squared distance of each row of `ids` from a query, float32 of shape `(m,)`."""
        distances = np.empty(len(ids), dtype=np.float32)
        squared_distances(self.rows, ids, query, distances)
        return -distances

    def best(self, query: np.ndarray, ids: np.ndarray, k: int) -> Retrieved:
        """The `k` nearest of some rows."""
        return Retrieved.best(ids, self.score(query, ids), k)

    def search(self, queries: np.ndarray, k: int) -> list[Retrieved]:
        """The `k` nearest rows of each query (float32 of shape `(q, d)`)."""
        raise NotImplementedError


class ScannedRows(Rows):
    """Looks at all rows: exact.

    A batch is scanned together: eight queries take about 1.4 times as long as one, where FAISS's
    flat index takes five to eight times as long. The rows are not copied: they can be mapped into
    memory.

    Args:
        rows (`np.ndarray`, float32 of shape `(n, d)`): The rows.
        norms (`np.ndarray`, float32 of shape `(n,)`): The squared length of each.
    """

    def __init__(self, rows: np.ndarray, norms: np.ndarray) -> None:
        super().__init__(rows)
        self._norms = norms

    def search(self, queries: np.ndarray, k: int) -> list[Retrieved]:
        found = []
        for begin in range(0, len(queries), QUERIES_AT_ONCE):
            some = queries[begin : begin + QUERIES_AT_ONCE]
            found += self._search(some, k, k + max(k // 8, SPARE))
        return found

    def _search(self, queries: np.ndarray, k: int, most: int) -> list[Retrieved]:
        """Takes `most` candidates, and four times as many for those queries for which rounding
        errors may have kept one of the best out."""
        candidates = scan_rows(self.rows, self._norms, queries, most)
        found = [
            self.best(query, ids, k) for query, (ids, _) in zip(queries, candidates, strict=True)
        ]
        unsure = [
            i
            for i, (_, bound) in enumerate(candidates)
            if not self._is_settled(queries[i], found[i], k, bound)
        ]
        if unsure:
            again = self._search(queries[unsure], k, 4 * most)
            for i, answer in zip(unsure, again, strict=True):
                found[i] = answer
        return found

    def _is_settled(self, query: np.ndarray, found: Retrieved, k: int, bound: float) -> bool:
        """Whether no row beyond the candidates can be as near as the last of the best.

        A sum of d products in any order is off by at most d roundings of the sum of their absolute
        values. A row that is as near as the last of the best is no longer than `reach`.
        """
        if bound == _INFINITE or len(found) == len(self.rows):
            return True
        length = float(np.dot(query, query))
        last = -float(found.scores[k - 1])
        reach = length**0.5 + last**0.5
        error = 4 * (len(query) + 2) * UNIT_ROUNDOFF * (reach**2 + length)
        return last + error < bound + length


class LinkedRows(Rows):
    """Walks a graph of near rows (FAISS's HNSW): approximate, and much less work.

    Args:
        rows (`np.ndarray`, float32 of shape `(n, d)`): The rows; the graph holds a copy.

    Raises:
        ImportError: If FAISS is not installed (extra `retrieval`).
    """

    def __init__(self, rows: np.ndarray) -> None:
        super().__init__(rows)
        self._faiss = import_faiss('index="hnsw"')
        self._graph = self._faiss.IndexHNSWFlat(rows.shape[1], LINKS)
        self._graph.add(rows)

    def search(self, queries: np.ndarray, k: int) -> list[Retrieved]:
        walked = min(max(k, LEAST_WALKED), len(self.rows))
        how = self._faiss.SearchParametersHNSW(efSearch=walked)
        _, found = self._graph.search(queries, walked, params=how)
        # A graph that falls apart gives fewer, and -1 for the others.
        return [
            self.best(query, ids[ids >= 0], k) for query, ids in zip(queries, found, strict=True)
        ]


def import_faiss(what: str) -> Any:
    """FAISS.

    Args:
        what (`str`): What needs it.

    Raises:
        ImportError: If it is not installed.
    """
    try:
        import faiss
    except ImportError:
        raise ImportError(f'{what} needs FAISS: pip install "hf_refspec[retrieval]"') from None
    return faiss
