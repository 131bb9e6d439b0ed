"""Dense retrieval: exact, or approximate by a graph of near passages (FAISS)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from .embedding_search import EmbeddingSearch, Index
from .knowledge_base import KnowledgeBase
from .nearest_rows import scan

_LINKS = 32
_MOST_OF_A_GPU = 2048  # neighbours of a query, in FAISS
# Queries of one scan: as many as stay in the fastest memory beside a row.
_QUERIES_AT_ONCE = 32
Candidates = list[tuple[np.ndarray, float]]


class DenseRetriever(EmbeddingSearch):
    """Finds the passages whose embeddings have the largest inner product with the query's.

    The query is the text of the last tokens. `"flat"` looks at all passages: on the GPUs where
    faiss-gpu finds some (IndexFlatIP), else where they are, mapped into memory and not copied. All
    queries of a batch are held against a passage while it is at hand, so that a batch costs half of
    what it costs FAISS's flat index on a CPU, and one query the same. `"hnsw"` walks FAISS's graph,
    which is made here and holds a copy of the embeddings; it misses some passages, and is much
    faster.

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
        self._faiss = _import_faiss(needed=index == "hnsw")
        self._made = self._make_index()
        # The scan is one for distances; without lengths, a distance is an inner product.
        self._no_lengths = np.zeros(len(knowledge_base), dtype=np.float32)

    def _make_index(self) -> Any:
        """The FAISS index; `None` where the embeddings themselves are searched."""
        faiss, dimension = self._faiss, self._embeddings.shape[1]
        if self.index == "hnsw":
            made = faiss.IndexHNSWFlat(dimension, _LINKS, faiss.METRIC_INNER_PRODUCT)
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
                for begin in range(0, len(queries), _QUERIES_AT_ONCE)
                for each in self._scan(queries[begin : begin + _QUERIES_AT_ONCE], count)
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
        """Looks at all embeddings; every thread at a part of them."""
        total = len(self._embeddings)
        edges = np.linspace(0, total, min(torch.get_num_threads(), total) + 1, dtype=np.int64)
        parts = list(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True))
        if len(parts) == 1:
            scanned = [self._scan_part(queries, count, *parts[0])]
        else:
            with ThreadPoolExecutor(len(parts)) as threads:
                scanned = list(threads.map(lambda p: self._scan_part(queries, count, *p), parts))
        return [
            (np.concatenate([ids for ids, _ in of_query]), max(bound for _, bound in of_query))
            for of_query in zip(*scanned, strict=True)
        ]

    def _scan_part(self, queries: np.ndarray, count: int, begin: int, end: int) -> Candidates:
        count = min(count, end - begin)
        ids = np.empty((len(queries), 2 * count), dtype=np.int64)
        # Minus twice the products.
        distances = np.empty(ids.shape, dtype=np.float32)
        counts = np.zeros(len(queries), dtype=np.int64)
        largest = np.full(len(queries), np.inf, dtype=np.float32)
        rows, lengths = self._embeddings[begin:end], self._no_lengths[begin:end]
        scan(rows, lengths, queries, ids, distances, counts, largest)
        return [
            (begin + ids[query, : counts[query]], float(-largest[query]) / 2)
            for query in range(len(queries))
        ]


def _import_faiss(needed: bool) -> Any:
    """FAISS, if it is there."""
    try:
        import faiss
    except ImportError:
        if not needed:
            return None
        raise ImportError(
            'index="hnsw" needs FAISS: pip install "hf_refspec[retrieval]"; index="flat" does not'
        ) from None
    return faiss
