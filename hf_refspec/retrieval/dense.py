"""Dense retrieval: passages ranked by the inner product of their embedding and the query's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..store.files import DatastoreError
from .knowledge_base import KnowledgeBase, TextEncoder
from .retriever import Retrieved
from .vector_index import LEAST_WALKED, Index, index_type, squared_lengths


class DenseRetriever:
    """Finds the passages whose embeddings have the largest inner product with the query's.

    The query is the text of the last tokens. `"flat"` compares all passages, on GPUs if faiss-gpu
    finds some, otherwise by an int8 copy of their embeddings, a quarter of the size, that finds
    those to be read in full. `"hnsw"` walks a graph of FAISS, which is built here and holds a copy
    of the embeddings; it misses some passages and is much faster.

    Args:
        knowledge_base ([`KnowledgeBase`]): The passages to search.
        encoder (`str`, `Path`, `SentenceTransformer` or callable): The encoder that it was
            built with, see [`TextEncoder`].
        index (`"flat"` or `"hnsw"`, *optional*, defaults to `"flat"`): Exact or approximate.
        ef_search (`int`, *optional*, defaults to 128): How many candidates an approximate search
            has, which is also the most that `RalmSpeculation(prefetch=...)` can take.
        threads (`int`, *optional*): Threads of an exact search; torch's number by default. A model
            on the same CPU generates during a search only if cores are left for it.

    Raises:
        ValueError: If the knowledge base has no embeddings.
        DatastoreError: If an embedding is not finite.
        ImportError: If FAISS is not installed (extra `retrieval`) and the index is `"hnsw"`.
    """

    def __init__(
        self,
        knowledge_base: KnowledgeBase,
        encoder: Any,
        index: Index = "flat",
        ef_search: int = LEAST_WALKED,
        threads: int | None = None,
    ) -> None:
        if knowledge_base.embeddings is None:
            raise ValueError(
                f"knowledge_base has no embeddings: {knowledge_base.path} was built with "
                "encoder=None; build it with one, or search it with SparseRetriever"
            )
        self.knowledge_base = knowledge_base
        self.index = index
        self.ef_search = ef_search
        self._encoder = TextEncoder(encoder)
        vectors = knowledge_base.embeddings
        lengths = squared_lengths(vectors)
        bad = np.flatnonzero(~np.isfinite(lengths))
        if len(bad):
            raise DatastoreError(
                f"the embedding of passage {bad[0]} of {knowledge_base.path} is NaN or infinite; "
                "its files are damaged, build it again"
            )
        self._vectors = index_type(index)(vectors, lengths, "inner_product", threads)
        # An index makes what it needs in its first search, before text is generated.
        self._vectors.search(vectors[:1], 1)

    @property
    def search_threads(self) -> int:
        """The threads that a search keeps busy."""
        return self._vectors.search_threads

    def encode(self, token_ids: np.ndarray) -> np.ndarray:
        """The embedding (float32, `(d,)`) of the last tokens (int64, `(n,)`) of a text."""
        text = self.knowledge_base.tokenizer.decode(
            np.asarray(token_ids).tolist(),
            skip_special_tokens=True,
            clean_up_tokenization_spaces=False,
        )
        return self._encoder.query(str(text), self.knowledge_base.config.dimension)

    def search(self, queries: Sequence[np.ndarray], k: int) -> list[Retrieved]:
        """The `k` best passages for each query, all queries at once."""
        if len(queries) == 0:
            return []
        stacked = np.ascontiguousarray(np.stack(list(queries)), dtype=np.float32)
        return self._vectors.search(stacked, k, self.ef_search)

    def score(self, query: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """The scores (float32, `(n,)`) of the passages `ids` (int64, `(n,)`), not checked."""
        return self._vectors.score(query, ids)

    def passage(self, passage_id: int) -> np.ndarray:
        """The tokens (int64) of a passage."""
        return self.knowledge_base.passage(passage_id)
