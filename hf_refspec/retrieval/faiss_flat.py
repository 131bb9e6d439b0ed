"""Exact search by FAISS's flat index, on the GPUs where faiss-gpu finds some."""

from __future__ import annotations

import numpy as np

from .hnsw import import_faiss
from .vector_index import Metric, VectorIndex

_MOST_CANDIDATES = 2048  # of a query, on a GPU


class FaissFlatIndex(VectorIndex):
    """Looks at all vectors, of which the GPUs hold a copy: exact.

    Args:
        vectors, lengths, metric: See [`VectorIndex`].

    Raises:
        ImportError: If FAISS is not installed (extra `gpu` or `retrieval`).
    """

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
