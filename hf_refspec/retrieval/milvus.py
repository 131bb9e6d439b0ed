"""Dense retrieval with Milvus: an embedded file, or a cluster."""

from __future__ import annotations

import os
from time import monotonic, sleep
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from ..extras import require
from .dense import EmbeddingRetriever
from .hnsw import Index
from .knowledge_base import KnowledgeBase
from .vector_index import LEAST_WALKED, VectorIndex

# The most rows of a request, and the most results of a query.
_ROWS_AT_ONCE = 2000
_MOST_RESULTS = 16_384
_FIELD = "embedding"
_NOT_REACHED, _NOT_LOADED = 2, 101  # codes of pymilvus's errors
_PAUSE = 0.1  # seconds
_PARAMETERS = {"flat": {}, "hnsw": {"M": 32, "efConstruction": 200}}


class MilvusRetriever(EmbeddingRetriever):
    """Finds passages in Milvus, for knowledge bases that outgrow the memory of one machine.

    The same code runs on an embedded file (milvus-lite) and on a cluster. Milvus holds ids and
    vectors, and receives one request for all queries of a verification; texts stay in the knowledge
    base. A missing collection is created and filled; interrupted filling is resumed the next time.

    Args:
        knowledge_base ([`KnowledgeBase`]): What is searched.
        encoder (`str`, `Path`, `SentenceTransformer` or callable): The one that it was built
            with, see [`TextEncoder`].
        uri (`str` or `Path`): A file (`"passages.db"`), or an address (`"http://host:19530"`).
        index (`"flat"` or `"hnsw"`, *optional*, defaults to `"flat"`): Exact or approximate.
        collection (`str`, *optional*): Its name; by default one for just these embeddings and this
            index.
        token (`str`, *optional*): `"user:password"` or an API key, if the server requires one.
        timeout (`float`, *optional*, defaults to 60): The most seconds of a request to the server,
            and of a search's wait for a server that restarts.
        progress (`bool`, *optional*, defaults to `True`): Show a progress bar while filling.
        ef_search (`int`, *optional*, defaults to 128): As of [`DenseRetriever`].

    Raises:
        ValueError: If the index is neither, the knowledge base has no embeddings, or the collection
            holds something else.
        DatastoreError: If an embedding is not finite.
        OSError: If the server cannot be reached, or the file cannot be opened.
        ImportError: If pymilvus is not installed (extra `milvus`).
    """

    def __init__(
        self,
        knowledge_base: KnowledgeBase,
        encoder: Any,
        uri: str | os.PathLike,
        index: Index = "flat",
        collection: str | None = None,
        token: str | None = None,
        timeout: float = 60.0,
        progress: bool = True,
        ef_search: int = LEAST_WALKED,
    ) -> None:
        super().__init__(knowledge_base, encoder, index, ef_search)
        file = knowledge_base.config.embeddings_file
        assert file is not None  # or it would not have come so far
        self.collection = collection or f"hf_refspec_{file.sha256[:16]}_{index}"
        self._timeout = timeout
        self._vectors = VectorIndex(
            *(self._embeddings, self._lengths, "inner_product", self._candidates),
            exact=index == "flat",
            most_candidates=_MOST_RESULTS,
        )
        self._pymilvus = require("pymilvus", "MilvusRetriever", "milvus")
        try:
            self._client = self._pymilvus.MilvusClient(
                os.fspath(uri), token=token or "", timeout=timeout
            )
            self._fill(progress)
        except self._pymilvus.MilvusException as error:
            raise OSError(
                f"Milvus at uri={os.fspath(uri)!r} cannot be used ({error.message}); check the "
                "address, that the server is up, and token="
            ) from error

    def close(self) -> None:
        """Closes the file, or the connection."""
        self._client.close()

    def _fill(self, progress: bool) -> None:
        name, total = self.collection, len(self._embeddings)
        if not self._client.has_collection(name, timeout=self._timeout):
            self._create()
        self._load()
        (row,) = self._client.query(
            name, filter="", output_fields=["count(*)"], timeout=self._timeout
        )
        present = int(row["count(*)"])
        self._check(present)
        with tqdm(
            desc="filling Milvus",
            unit=" passages",
            total=total,
            initial=present,
            disable=not progress or present == total or None,
        ) as bar:
            for begin in range(present, total, _ROWS_AT_ONCE):
                some = self._embeddings[begin : begin + _ROWS_AT_ONCE]
                rows = [{"id": begin + i, _FIELD: row} for i, row in enumerate(some)]
                # upsert: an interrupted request may have written some of them.
                self._client.upsert(name, rows, timeout=self._timeout)
                bar.update(len(rows))

    def _create(self) -> None:
        pymilvus = self._pymilvus
        schema = pymilvus.MilvusClient.create_schema(auto_id=False, enable_dynamic_field=False)
        schema.add_field("id", pymilvus.DataType.INT64, is_primary=True)
        schema.add_field(_FIELD, pymilvus.DataType.FLOAT_VECTOR, dim=self._embeddings.shape[1])
        index = self._client.prepare_index_params()
        index.add_index(
            _FIELD,
            index_type=self.index.upper(),
            metric_type="IP",
            params=_PARAMETERS[self.index],
        )
        self._client.create_collection(
            self.collection,
            schema=schema,
            index_params=index,
            consistency_level="Strong",
            timeout=self._timeout,
        )

    def _load(self) -> None:
        self._client.load_collection(self.collection, timeout=self._timeout)

    def _check(self, present: int) -> None:
        """Compares what the collection holds with the knowledge base: its size, and samples."""
        total = len(self._embeddings)
        samples = sorted({0, present // 2, present - 1}) if 0 < present <= total else []
        rows = []
        if samples:
            rows = self._client.get(
                self.collection, samples, output_fields=["id", _FIELD], timeout=self._timeout
            )
        same = all(np.array_equal(row[_FIELD], self._embeddings[row["id"]]) for row in rows)
        if present > total or len(rows) != len(samples) or not same:
            raise ValueError(
                f"collection {self.collection!r} holds {present} other vectors than the {total} of "
                f"{self.knowledge_base.path}; drop it, or give another name: collection="
            )

    def _candidates(self, queries: np.ndarray, count: int) -> list[tuple[np.ndarray, float]]:
        """Searches; an unreachable server is asked again for as long as a request may take: one
        that restarts is back within seconds, with nothing loaded, but its client refuses at once.
        """
        parameters = {"ef": count} if self.index == "hnsw" else {}
        exception = self._pymilvus.MilvusException
        deadline = monotonic() + self._timeout
        while True:
            try:
                answers = self._client.search(
                    self.collection,
                    data=list(queries),
                    anns_field=_FIELD,
                    limit=count,
                    output_fields=["id"],  # else milvus-lite sends the vectors as well
                    search_params={"metric_type": "IP", "params": parameters},
                    consistency_level="Strong",
                    timeout=self._timeout,
                )
                return [(np.array(each.ids, np.int64), each.distances[-1]) for each in answers]
            except exception as error:
                if error.code not in (_NOT_REACHED, _NOT_LOADED) or monotonic() > deadline:
                    raise
                sleep(_PAUSE)
                if error.code == _NOT_LOADED:
                    self._load()
