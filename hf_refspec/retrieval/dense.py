"""Dense retrieval: exact, or approximate by a graph of near passages (FAISS)."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..index.nearest_rows import LINKS, QUERIES_AT_ONCE, import_faiss, scan_rows
from ..store.knowledge_base import KnowledgeBase
from .embedding_search import EmbeddingSearch, Index

_MOST_OF_A_GPU = 2048  # neighbours of a query, in FAISS
Candidates = list[tuple[np.ndarray, float]]


class DenseRetriever(EmbeddingSearch):
    """Finds the passages whose embeddings have the largest inner product with the query's.

    The query is the text of the last tokens. `"flat"` looks at all passages: on the GPUs where
    faiss-gpu finds some (IndexFlatIP), else where they are, mapped into memory and not copied. All
    queries of a batch are held against a passage while it is at hand, so that eight cost a quarter
    of what they cost FAISS's flat index on a CPU, and one query the same. `"hnsw"` walks FAISS's
    graph, which is made here and holds a copy of the embeddings; it misses some passages, and is
    much faster.

    Args:
        knowledge_base ([`KnowledgeBase`]): What is searched.
        encoder (callable or `SentenceTransformer`): The one that it was built with.
        index (`"flat"` or `"hnsw"`, *optional*, defaults to `"flat"`): Exact or approximate.

    Raises:
        ValueError: If the index is neither, or the knowledge base has no embeddings.
        DatastoreError: If an embedding is not finite.
        ImportError: If FAISS is not installed (extra `retrieval`) and the index is `"hnsw"`.
    """

    def __init__(self, knowledge_base: KnowledgeBase, encoder: Any, index: Index = "flat") -> None:
        super().__init__(knowledge_base, encoder, index)
        self._faiss = import_faiss('index="hnsw"') if index == "hnsw" else _faiss_if_there()
        self._made = self._make_index()
        self._no_lengths = np.zeros(len(knowledge_base), dtype=np.float32)

    def _make_index(self) -> Any:
        """The FAISS index; `None` where the embeddings themselves are searched."""
        faiss, dimension = self._faiss, self._embeddings.shape[1]
        if self.index == "hnsw":
            made = faiss.IndexHNSWFlat(dimension, LINKS, faiss.METRIC_INNER_PRODUCT)
        elif faiss is not None and faiss.get_num_gpus() > 0:
            made = faiss.index_cpu_to_all_gpus(faiss.IndexFlatIP(dimension))
            self._most_candidates = min(self._most_candidates, _MOST_OF_A_GPU)
        else:
            return None
        made.add(self._embeddings)
        return made

    def _candidates(self, queries: np.ndarray, count: int) -> Candidates:
        if self._made is None:
            return [
                each
                for begin in range(0, len(queries), QUERIES_AT_ONCE)
                for each in self._scan(queries[begin : begin + QUERIES_AT_ONCE], count)
            ]
        options = {}
        if self.index == "hnsw":
            options["params"] = self._faiss.SearchParametersHNSW(efSearch=count)
        products, ids = self._made.search(queries, count, **options)
        # A graph that falls apart gives fewer, and -1 for the others.
        return [
            (some[some >= 0], float(likely[-1])) for some, likely in zip(ids, products, strict=True)
        ]

    def _scan(self, queries: np.ndarray, count: int) -> Candidates:
        """Looks at all embeddings."""
        # Without lengths, a distance is minus twice the product.
        found = scan_rows(self._embeddings, self._no_lengths, queries, count)
        return [(ids, -bound / 2) for ids, bound in found]


def _faiss_if_there() -> Any:
    try:
        return import_faiss("GPU search")
    except ImportError:
        return None
