"""Exact search, which compares every vector with every query of a batch."""

# mypy: disallow-untyped-defs=False
# The types of a kernel's arguments are those of its numba signatures.

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import torch
from numba import njit

from ..index.kernels import kernel
from .vector_index import HnswIndex, Index, Metric, VectorIndex, import_faiss, score_row, vectorised

_BLOCK = 256  # rows that are scored before the best of them are picked
_TOGETHER = 4  # queries that are scored in one pass over a row
_MOST_CANDIDATES = 2048  # that FAISS finds for a query on a GPU


class FlatIndex(VectorIndex):
    """Scores all vectors in `threads` threads, by default torch's number."""

    exact = True

    def __init__(self, vectors: np.ndarray, lengths: np.ndarray, metric: Metric) -> None:
        super().__init__(vectors, lengths, metric)
        scan.compile()

    @property
    def search_threads(self) -> int:  # type: ignore[override]
        return self.threads or torch.get_num_threads()

    def candidates(self, queries: np.ndarray, count: int) -> list[tuple[np.ndarray, float]]:
        # torch aligns it to a cache line, without which scoring four takes up to twice as long.
        padded = torch.zeros(len(queries) + -len(queries) % _TOGETHER, queries.shape[1]).numpy()
        padded[: len(queries)] = queries

        def scan_part(part: tuple[int, int]) -> tuple[np.ndarray, ...]:
            ids = np.empty((len(queries), 2 * count), np.int64)
            counts = np.zeros(len(queries), np.int64)
            bounds = np.empty(len(queries), np.float32)
            rows = self.vectors[slice(*part)]
            scan(rows, padded, self.metric == "l2", ids, counts, bounds)
            return ids + part[0], counts, bounds

        threads = min(self.search_threads, len(self.vectors))
        edges = np.linspace(0, len(self.vectors), threads + 1, dtype=np.int64).tolist()
        with ThreadPoolExecutor(threads) as pool:
            parts = list(pool.map(scan_part, pairwise(edges)))
        return [
            (
                np.concatenate([ids[i, : counts[i]] for ids, counts, _ in parts]),
                max(float(bounds[i]) for _, _, bounds in parts),
            )
            for i in range(len(queries))
        ]


@kernel(
    "void(float32[:, ::1], float32[:, ::1], boolean, int64[:, ::1], int64[::1], float32[::1])",
    drafts=False,
)
def scan(rows, queries, by_distance, ids, counts, bounds):
    """Finds the rows (n, d) with the highest scores for each query. The score is minus the squared
    distance with `by_distance`, otherwise the inner product. The q queries (p, d) are padded to a
    multiple of four. The first columns of `ids` (q, 2 * k) receive the rows, unordered, `counts`
    (q,) their number, at most k, and `bounds` (q,) a bound on the scores of all others."""
    k = ids.shape[1] // 2
    first = queries[0]
    scores = np.empty(ids.shape, np.float32)
    block = np.empty((len(queries), _BLOCK), np.float32)
    counts[:] = 0
    bounds[:] = -np.inf
    for begin in range(0, len(rows), _BLOCK):
        size = min(_BLOCK, len(rows) - begin)
        for s in range(0, len(ids), _TOGETHER):
            for i in range(size):
                if len(ids) == 1:
                    block[s, i] = score_row(rows, begin + i, first, by_distance)
                else:
                    four = _score_four(rows, begin + i, queries, s, by_distance)
                    block[s, i], block[s + 1, i], block[s + 2, i], block[s + 3, i] = four
        for s in range(len(ids)):
            for i in range(size):
                if block[s, i] > bounds[s]:
                    ids[s, counts[s]] = begin + i
                    scores[s, counts[s]] = block[s, i]
                    counts[s] += 1
                    if counts[s] == 2 * k:
                        bounds[s] = _keep_best(ids[s], scores[s], k)
                        counts[s] = k
    for s in range(len(ids)):
        if counts[s] > k:
            bounds[s] = _keep_best(ids[s, : counts[s]], scores[s, : counts[s]], k)
            counts[s] = k


@njit(nogil=True)
def _keep_best(ids, scores, k):
    """Moves the `k` highest scores to the front; returns the lowest of them."""
    order = np.argpartition(scores, len(scores) - k)[len(scores) - k :]
    ids[:k], scores[:k] = ids[order], scores[order]
    return scores[0]


@vectorised
def _score_four(rows, row, queries, first, by_distance):
    """The scores of a row for four queries."""
    a = b = c = d = np.float32(0)
    if by_distance:
        for j in range(rows.shape[1]):
            number = rows[row, j]
            a -= (number - queries[first, j]) ** 2
            b -= (number - queries[first + 1, j]) ** 2
            c -= (number - queries[first + 2, j]) ** 2
            d -= (number - queries[first + 3, j]) ** 2
    else:
        for j in range(rows.shape[1]):
            number = rows[row, j]
            a += number * queries[first, j]
            b += number * queries[first + 1, j]
            c += number * queries[first + 2, j]
            d += number * queries[first + 3, j]
    return a, b, c, d


class FaissFlatIndex(FlatIndex):
    """Scores all vectors with FAISS on GPUs, which hold copies of them (extra `gpu`); on the CPU if
    more candidates are needed than FAISS finds."""

    search_threads = 1

    def __init__(self, vectors: np.ndarray, lengths: np.ndarray, metric: Metric) -> None:
        faiss = import_faiss("FaissFlatIndex")
        by = faiss.IndexFlatL2 if metric == "l2" else faiss.IndexFlatIP
        index = by(vectors.shape[1])
        self._index = index if faiss.get_num_gpus() == 0 else faiss.index_cpu_to_all_gpus(index)
        self._index.add(vectors)
        super().__init__(vectors, lengths, metric)

    def candidates(self, queries: np.ndarray, count: int) -> list[tuple[np.ndarray, float]]:
        if count > _MOST_CANDIDATES:
            return super().candidates(queries, count)
        scores, ids = self._index.search(queries, count)
        if self.metric == "l2":
            scores = -scores
        return [(some, float(best[-1])) for some, best in zip(ids, scores, strict=True)]


def finds_gpus() -> bool:
    """Whether FAISS is installed with support for GPUs and finds one."""
    try:
        return bool(import_faiss("a GPU").get_num_gpus() > 0)
    except ImportError:
        return False


def index_type(index: Index) -> type[FlatIndex | HnswIndex]:
    """The class of an exact index, on GPUs if FAISS finds some, or of an approximate one."""
    if index == "hnsw":
        return HnswIndex
    return FaissFlatIndex if finds_gpus() else FlatIndex
