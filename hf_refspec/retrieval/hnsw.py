"""Approximate search by a graph of near vectors (HNSW, arXiv 1603.09320), by FAISS."""

from __future__ import annotations

from importlib.metadata import distributions
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from ..extras import require
from .vector_index import Metric, VectorIndex

# How a retriever or a kNN datastore searches: exactly or approximately.
Index: TypeAlias = Literal["flat", "hnsw"]
_LINKS = 32  # of a vector in the graph


def check_index(index: object) -> None:
    """Raises a ValueError for anything but the name of an index."""
    if index not in get_args(Index):
        raise ValueError(f"index must be one of {get_args(Index)}, but is {index!r}")


class HnswIndex(VectorIndex):
    """Walks the graph: approximate, and much less work than looking at all vectors.

    The graph is built here, and holds a copy of the vectors. It needs FAISS (extra `retrieval`).
    """

    exact = False

    def __init__(self, vectors: np.ndarray, lengths: np.ndarray, metric: Metric) -> None:
        self._faiss = faiss = import_faiss('index="hnsw"')
        by = faiss.METRIC_L2 if metric == "l2" else faiss.METRIC_INNER_PRODUCT
        self._graph = faiss.IndexHNSWFlat(vectors.shape[1], _LINKS, by)
        self._graph.add(vectors)
        super().__init__(vectors, lengths, metric)

    def candidates(self, queries: np.ndarray, count: int) -> list[tuple[np.ndarray, float]]:
        parameters = self._faiss.SearchParametersHNSW(efSearch=count)
        _, ids = self._graph.search(queries, count, params=parameters)
        # A disconnected graph returns fewer, and -1 for the others.
        return [(some[some >= 0], np.inf) for some in ids]


def import_faiss(what: str) -> Any:
    """Imports FAISS, which `what` needs."""
    if all(any(distributions(name=name)) for name in ("faiss-cpu", "faiss-gpu")):
        raise ImportError(
            "faiss-cpu and faiss-gpu are both installed, and overwrite each other's files: pip "
            'uninstall both, then install either "hf_refspec[retrieval]" or "hf_refspec[gpu]"'
        )
    return require("faiss", what, "retrieval")
