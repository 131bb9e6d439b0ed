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

from ..index.kernels import kernel
from .retriever import Retrieved

# Rows that a graph search looks for at least: which of them it finds must not depend on how many
# of the best are wanted, as a cache wants more than a step.
LEAST_WALKED = 128
LINKS = 32
# Queries of one scan: as many as stay in the fastest memory beside a row.
QUERIES_AT_ONCE = 32
# Candidates beyond k that an exact search takes: so many may be as good as the k-th.
SPARE = 16
UNIT_ROUNDOFF = 2.0**-24
# Rows whose products are taken before they are looked at: few enough to stay near.
_BLOCK = 256
_INFINITE = np.float32(np.inf)
# A sum may be taken in another order, so that it can be vectorised.
_fast = njit(fastmath={"reassoc", "contract", "nsz"}, nogil=True)


@_fast
def _dots_of_one(rows, i, queries, s):
    dot = np.float32(0)
    for j in range(rows.shape[1]):
        dot += rows[i, j] * queries[s, j]
    return dot


@_fast
def _dots_of_two_with_four(rows, i, queries, s, dots, r):
    """Each number that is loaded is used several times: that is what makes a batch cheap."""
    a = b = c = d = e = f = g = h = np.float32(0)
    for j in range(rows.shape[1]):
        x, y = rows[i, j], rows[i + 1, j]
        p, q, t, u = queries[s, j], queries[s + 1, j], queries[s + 2, j], queries[s + 3, j]
        a += x * p
        b += x * q
        c += x * t
        d += x * u
        e += y * p
        f += y * q
        g += y * t
        h += y * u
    dots[s, r], dots[s + 1, r], dots[s + 2, r], dots[s + 3, r] = a, b, c, d
    dots[s, r + 1], dots[s + 1, r + 1], dots[s + 2, r + 1], dots[s + 3, r + 1] = e, f, g, h


@njit(nogil=True)
def _dots_of_block(rows, begin, size, queries, dots):
    """Of `size` rows from `begin` on with all queries."""
    count = len(queries)
    for r in range(0, size - 1, 2):
        for s in range(0, count - 3, 4):
            _dots_of_two_with_four(rows, begin + r, queries, s, dots, r)
    for s in range(count):
        together = s < count - count % 4
        for r in range(size - size % 2 if together else 0, size):
            dots[s, r] = _dots_of_one(rows, begin + r, queries, s)


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
    dots = np.empty((len(queries), _BLOCK), dtype=np.float32)
    for begin in range(0, len(rows), _BLOCK):
        size = min(_BLOCK, len(rows) - begin)
        _dots_of_block(rows, begin, size, queries, dots)
        for s in range(len(queries)):
            bound, count = largest[s], counts[s]
            for r in range(size):
                distance = norms[begin + r] - 2 * dots[s, r]
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
    return found[: len(queries)]


def _scan_part(
    rows: np.ndarray, norms: np.ndarray, queries: np.ndarray, most: int, part: slice
) -> list[tuple[np.ndarray, float]]:
    most = min(most, part.stop - part.start)
    queries = _in_fours(queries)
    ids = np.empty((len(queries), 2 * most), dtype=np.int64)
    distances = np.empty(ids.shape, dtype=np.float32)
    counts = np.zeros(len(queries), dtype=np.int64)
    largest = np.full(len(queries), _INFINITE)
    scan(rows[part], norms[part], queries, ids, distances, counts, largest)
    return [
        (part.start + some[:count], float(bound))
        for some, count, bound in zip(ids, counts, largest, strict=True)
    ]


def _in_fours(queries: np.ndarray) -> np.ndarray:
    """As many queries as the scan is fast with: eight take less time than four to seven."""
    wanted = len(queries) if len(queries) < 4 else max(8, -(-len(queries) // 4) * 4)
    return np.pad(queries, ((0, wanted - len(queries)), (0, 0)), mode="edge")


@_fast
def _squared_distance(row, query):
    total = np.float32(0)
    for j in range(len(query)):
        difference = row[j] - query[j]
        total += difference * difference
    return total


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

    A batch is scanned together: eight queries take two to three times as long as one, where FAISS's
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
        self._faiss = import_faiss()
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


def import_faiss() -> Any:
    """FAISS, which a graph needs.

    Raises:
        ImportError: If it is not installed.
    """
    try:
        import faiss
    except ImportError:
        raise ImportError(
            'index="hnsw" needs FAISS: pip install "hf_refspec[retrieval]"; index="flat" does not'
        ) from None
    return faiss
