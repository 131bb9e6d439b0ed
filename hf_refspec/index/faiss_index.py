"""Search among vectors by FAISS: approximate by its HNSW graph, exact on GPUs."""

from __future__ import annotations

from typing import Any

import numpy as np

from .vector_index import Metric, VectorIndex

_LINKS = 32  # of a vector in the graph
_MOST_OF_A_GPU = 2048  # candidates of a query, in FAISS


class FaissIndex(VectorIndex):
    """A FAISS index finds the candidates.

    Args:
        vectors, lengths, metric, exact, most_candidates: See [`VectorIndex`].
        index (`faiss.Index`): Holds the vectors, in their order, with the same metric.
    """

    def __init__(
        self,
        vectors: np.ndarray,
        lengths: np.ndarray,
        metric: Metric,
        index: Any,
        exact: bool,
        most_candidates: int | None = None,
    ) -> None:
        super().__init__(vectors, lengths, metric, exact, most_candidates)
        self._index = index

    def candidates(self, queries: np.ndarray, count: int) -> list[tuple[np.ndarray, float]]:
        scores, ids = self._index.search(queries, count, **self._options(count))
        if self.metric == "l2":
            scores = -scores
        # A graph that falls apart gives fewer, and -1 for the others.
        return [
            (some[some >= 0], float(best_first[-1]))
            for some, best_first in zip(ids, scores, strict=True)
        ]

    def _options(self, count: int) -> dict[str, Any]:
        return {}


class HnswIndex(FaissIndex):
    """Walks a graph of near vectors (HNSW, arXiv 1603.09320): approximate, and much less work.

    The graph is built here, and holds a copy of the vectors.

    Args:
        vectors, lengths, metric: See [`VectorIndex`].

    Raises:
        ImportError: If FAISS is not installed (extra `retrieval`).
    """

    def __init__(self, vectors: np.ndarray, lengths: np.ndarray, metric: Metric) -> None:
        self._faiss = faiss = import_faiss('index="hnsw"')
        by = faiss.METRIC_L2 if metric == "l2" else faiss.METRIC_INNER_PRODUCT
        graph = faiss.IndexHNSWFlat(vectors.shape[1], _LINKS, by)
        graph.add(vectors)
        super().__init__(vectors, lengths, metric, graph, exact=False)

    def _options(self, count: int) -> dict[str, Any]:
        return {"params": self._faiss.SearchParametersHNSW(efSearch=count)}


def gpu_flat_index(vectors: np.ndarray, lengths: np.ndarray, metric: Metric) -> FaissIndex | None:
    """An exact index with copies of the vectors on all GPUs; `None` where FAISS finds no GPU, or is
    not installed. Arguments as of [`VectorIndex`]."""
    try:
        faiss = import_faiss("search on GPUs")
    except ImportError:
        return None
    if faiss.get_num_gpus() == 0:
        return None
    flat = faiss.IndexFlatL2 if metric == "l2" else faiss.IndexFlatIP
    on_gpus = faiss.index_cpu_to_all_gpus(flat(vectors.shape[1]))
    on_gpus.add(vectors)
    return FaissIndex(vectors, lengths, metric, on_gpus, exact=True, most_candidates=_MOST_OF_A_GPU)


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
