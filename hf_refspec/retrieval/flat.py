"""Exact search, which compares every vector with every query of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial

import numpy as np
import torch

from .int8_copy import ApproximateScores, Int8Copy
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
)

_TOGETHER = 4  # queries of a scan, whose approximate scores are all in memory
# Beyond k, the fewest candidates that FAISS finds: they may be as good as the k-th.
_SPARE = 16
_MOST_CANDIDATES = 2048  # that FAISS finds for a query on a GPU


class FlatIndex(VectorIndex):
    """Scans an int8 copy of the vectors in `threads` threads, by default torch's number, and scores
    the vectors that may be among the best. The first search makes the copy; it raises a
    FloatingPointError if vectors are not finite."""

    @cached_property
    def _int8_copy(self) -> Int8Copy:
        return Int8Copy(self.vectors, self.metric == "l2")

    @property
    def search_threads(self) -> int:  # type: ignore[override]
        return self.threads or torch.get_num_threads()

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
        """The `k` best vectors for a query (float32, `(d,)`), of parts that begin at `begins`
        (int64, `(parts,)`)."""
        ids = np.concatenate([a + part.best for a, part in zip(begins, parts, strict=True)])
        found = Retrieved.best(ids, self.score(query, ids), k)
        least = float(found.scores[-1])
        least -= self._rounding(query, least)
        ids = np.concatenate(
            [a + part.at_least(least) for a, part in zip(begins, parts, strict=True)]
        )
        return Retrieved.best(ids, self.score(query, ids), k)

    def _rounding(self, query: np.ndarray, score: float) -> float:
        """The largest error of a score that is at least `score`, against the true one or one summed
        in another order, for a query (float32, `(d,)`).

        A sum of d products in any order is off by at most d roundings of the sum of their absolute
        values, which is at most the product of both lengths.
        """
        length = float(np.linalg.norm(query.astype(np.float64)))
        roundings = 2 * (len(query) + 2) * UNIT_ROUNDOFF
        if self.metric == "inner_product":
            return roundings * length * self._longest + UNDERFLOW
        reach = length + max(-score, 0.0) ** 0.5  # the length of so near a vector is at most this
        return 2 * roundings * (reach**2 + length**2) + UNDERFLOW


class FaissFlatIndex(FlatIndex):
    """Scores all vectors with FAISS on GPUs, which hold copies of them (extra `gpu`); on the CPU if
    more candidates are needed than FAISS finds."""

    search_threads = 1

    def __init__(self, vectors: np.ndarray, lengths: np.ndarray, metric: Metric) -> None:
        super().__init__(vectors, lengths, metric)
        faiss = import_faiss("FaissFlatIndex")
        by = faiss.IndexFlatL2 if metric == "l2" else faiss.IndexFlatIP
        index = by(vectors.shape[1])
        self._index = index if faiss.get_num_gpus() == 0 else faiss.index_cpu_to_all_gpus(index)
        self._index.add(vectors)

    def search(self, queries: np.ndarray, k: int, ef_search: int = LEAST_WALKED) -> list[Retrieved]:
        k = min(k, len(self.vectors))
        return self._best_of(queries, k, k + max(k // 8, _SPARE))

    def _best_of(self, queries: np.ndarray, k: int, count: int) -> list[Retrieved]:
        """The best of `count` candidates for each query (float32, `(q, d)`); of four times that
        number where these may lack a vector that is as good as the k-th."""
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
    if index == "hnsw":
        return HnswIndex
    return FaissFlatIndex if finds_gpus() else FlatIndex
