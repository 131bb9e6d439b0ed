"""Exact search: every vector is compared with every query of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import torch

from .candidates import CandidateIndex
from .hnsw import import_faiss
from .retrieved import Retrieved
from .vector_index import Metric, VectorIndex

_ROWS_AT_ONCE = 1 << 15
_MOST_CANDIDATES = 2048  # of a query, by FAISS on a GPU


class FlatIndex(VectorIndex):
    """Looks at all vectors, each of torch's threads at a part of them."""

    def __init__(self, vectors: np.ndarray, lengths: np.ndarray, metric: Metric) -> None:
        super().__init__(vectors, metric)

    def search(self, queries: np.ndarray, k: int) -> list[Retrieved]:
        def search_part(part: tuple[int, int]) -> list[Retrieved]:
            return self._search_part(queries, k, *part)

        count = min(torch.get_num_threads(), len(self.vectors))
        edges = np.linspace(0, len(self.vectors), count + 1, dtype=np.int64).tolist()
        with ThreadPoolExecutor(count) as threads:
            parts = list(threads.map(search_part, pairwise(edges)))
        return [_best_of(found, k) for found in zip(*parts, strict=True)]

    def _search_part(self, queries: np.ndarray, k: int, begin: int, end: int) -> list[Retrieved]:
        best = [Retrieved(np.empty(0, np.int64), np.empty(0, np.float32))] * len(queries)
        for first in range(begin, end, _ROWS_AT_ONCE):
            ids = np.arange(first, min(first + _ROWS_AT_ONCE, end))
            for i, scores in enumerate(self.scores(queries, ids)):
                better = scores > (best[i].scores[-1] if len(best[i]) == k else -np.inf)
                best[i] = _best_of([best[i], Retrieved(ids[better], scores[better])], k)
        return best


def _best_of(found: Sequence[Retrieved], k: int) -> Retrieved:
    ids = np.concatenate([each.ids for each in found])
    return Retrieved.best(ids, np.concatenate([each.scores for each in found]), k)


class FaissFlatIndex(CandidateIndex):
    """Looks at all vectors by FAISS, on copies that the GPUs hold (extra `gpu`)."""

    def __init__(self, vectors: np.ndarray, lengths: np.ndarray, metric: Metric) -> None:
        faiss = import_faiss("FaissFlatIndex")
        by = faiss.IndexFlatL2 if metric == "l2" else faiss.IndexFlatIP
        index = by(vectors.shape[1])
        self._index = index if faiss.get_num_gpus() == 0 else faiss.index_cpu_to_all_gpus(index)
        self._index.add(vectors)
        super().__init__(
            vectors, lengths, metric, self._search, exact=True, most_candidates=_MOST_CANDIDATES
        )

    def _search(self, queries: np.ndarray, count: int) -> list[tuple[np.ndarray, float]]:
        scores, ids = self._index.search(queries, count)
        if self.metric == "l2":
            scores = -scores
        return [(some, float(best[-1])) for some, best in zip(ids, scores, strict=True)]


def finds_gpus() -> bool:
    """Whether FAISS is installed with support for GPUs, and there are some."""
    try:
        return bool(import_faiss("a GPU").get_num_gpus() > 0)
    except ImportError:
        return False
