"""Dense retrieval with Milvus: an embedded file, or a cluster."""

from __future__ import annotations

import os
from collections.abc import Callable
from time import monotonic, sleep
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from ..index.vector_index import VectorIndex
from ..store.knowledge_base import KnowledgeBase
from .dense import EmbeddingRetriever, Index

# What a server takes at once, and what it returns.
_ROWS_AT_ONCE = 2000
_MOST_RESULTS = 16_384
_FIELD = "embedding"
_NOT_REACHED, _NOT_LOADED = 2, 101  # codes of pymilvus's errors
_PAUSE = 0.1  # seconds
_PARAMETERS = {"flat": {}, "hnsw": {"M": 32, "efConstruction": 200}}


class MilvusRetriever(EmbeddingRetriever):
    """Finds passages in Milvus, for knowledge bases that outgrow the memory of one machine.

    The same code runs on an embedded file (milvus-lite) and on a cluster. Milvus holds ids and
    vectors, and is asked once for all queries of a verification; texts stay in the knowledge base.
    The collection is made and filled where it is not there; if that is interrupted, the next time
    goes on with it.

    Args:
        knowledge_base ([`KnowledgeBase`]): What is searched.
        encoder (callable or `SentenceTransformer`): The one that it was built with.
        uri (`str` or `Path`): A file (`"passages.db"`), or an address (`"http://host:19530"`).
        index (`"flat"` or `"hnsw"`, *optional*, defaults to `"flat"`): Exact or approximate.
        collection (`str`, *optional*): Its name; by default one for just these embeddings and this
            index.
        token (`str`, *optional*): `"user:password"` or an API key, where the server wants it.
        timeout (`float`, *optional*, defaults to 60): The most seconds of a request to the
            server. A search waits so long for one that cannot be reached, as when it restarts.
        progress (`bool`, *optional*, defaults to `True`): Show a progress bar while filling.

    Raises:
        ValueError: If the index is neither, the knowledge base has no embeddings, or the collection
            holds something else.
        DatastoreError: If an embedding is not finite.
        OSError: If the server cannot be reached, or the file cannot be opened.
        ImportError: If pymilvus is not installed (extra `milvus`).
    """

    _vectors: _Collection

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
    ) -> None:
        super().__init__(knowledge_base, encoder, index)
        self.collection = collection or self._collection_name()
        pymilvus = _import_pymilvus()
        try:
            client = pymilvus.MilvusClient(os.fspath(uri), token=token or "", timeout=timeout)
            self._vectors = _Collection(
                client, self.collection, self._embeddings, self._lengths, index, timeout
            )
            self._vectors.fill(str(knowledge_base.path), progress)
        except pymilvus.MilvusException as error:
            raise OSError(
                f"Milvus at uri={os.fspath(uri)!r} cannot be used ({error.message}); check the "
                "address, that the server is up, and token="
            ) from error

    def close(self) -> None:
        """Closes the file, or the connection."""
        self._vectors.client.close()

    def _collection_name(self) -> str:
        file = self.knowledge_base.config.embeddings_file
        assert file is not None  # or it would not have come so far
        return f"hf_refspec_{file.sha256[:16]}_{self.index}"


class _Collection(VectorIndex):
    """A collection of a Milvus server, which finds the candidates.

    Args:
        client (`pymilvus.MilvusClient`): Talks to it.
        name (`str`): The collection's.
        embeddings, lengths: The vectors that it holds, see [`VectorIndex`].
        index (`"flat"` or `"hnsw"`): How it is searched.
        timeout (`float`): The most seconds of a request.
    """

    def __init__(
        self,
        client: Any,
        name: str,
        embeddings: np.ndarray,
        lengths: np.ndarray,
        index: Index,
        timeout: float,
    ) -> None:
        super().__init__(
            embeddings, lengths, "inner_product", index == "flat", most_candidates=_MOST_RESULTS
        )
        self.client = client
        self.timeout = timeout
        self._name = name
        self._index = index

    def fill(self, path: str, progress: bool) -> None:
        """Makes the collection where it is not there, and fills it where it is not full.

        Raises:
            ValueError: If it holds something else than the embeddings of `path`.
        """
        name, total = self._name, len(self.vectors)
        if not self.client.has_collection(name, timeout=self.timeout):
            self._create()
        self._load()
        present = self._count()
        self._check(present, path)
        with tqdm(
            desc="filling Milvus",
            unit=" passages",
            total=total,
            initial=present,
            disable=not progress or present == total,
        ) as bar:
            for begin in range(present, total, _ROWS_AT_ONCE):
                some = self.vectors[begin : begin + _ROWS_AT_ONCE]
                rows = [{"id": begin + i, _FIELD: row} for i, row in enumerate(some)]
                # What a request that was cut off has left is written again, not twice.
                self.client.upsert(name, rows, timeout=self.timeout)
                bar.update(len(rows))

    def _create(self) -> None:
        pymilvus = _import_pymilvus()
        schema = pymilvus.MilvusClient.create_schema(auto_id=False, enable_dynamic_field=False)
        schema.add_field("id", pymilvus.DataType.INT64, is_primary=True)
        schema.add_field(_FIELD, pymilvus.DataType.FLOAT_VECTOR, dim=self.vectors.shape[1])
        index = self.client.prepare_index_params()
        index.add_index(
            _FIELD,
            index_type=self._index.upper(),
            metric_type="IP",
            params=_PARAMETERS[self._index],
        )
        self.client.create_collection(
            self._name,
            schema=schema,
            index_params=index,
            consistency_level="Strong",
            timeout=self.timeout,
        )

    def _load(self) -> None:
        """Has the server take the collection into its memory, if it is not there."""
        self.client.load_collection(self._name, timeout=self.timeout)

    def _count(self) -> int:
        (row,) = self.client.query(
            self._name, filter="", output_fields=["count(*)"], timeout=self.timeout
        )
        return int(row["count(*)"])

    def _check(self, present: int, path: str) -> None:
        """Compares what the collection holds with the knowledge base: its size, and samples."""
        total = len(self.vectors)
        samples = sorted({0, present // 2, present - 1}) if 0 < present <= total else []
        rows = []
        if samples:
            rows = self.client.get(
                self._name, samples, output_fields=["id", _FIELD], timeout=self.timeout
            )
        same = all(np.array_equal(row[_FIELD], self.vectors[row["id"]]) for row in rows)
        if present > total or len(rows) != len(samples) or not same:
            raise ValueError(
                f"collection {self._name!r} holds {present} other vectors than the {total} of "
                f"{path}; drop it, or give another name: collection="
            )

    def candidates(self, queries: np.ndarray, count: int) -> list[tuple[np.ndarray, float]]:
        parameters = {"ef": count} if self._index == "hnsw" else {}
        answers = self._once_reachable(
            lambda: self.client.search(
                self._name,
                data=list(queries),
                anns_field=_FIELD,
                limit=count,
                output_fields=["id"],  # else milvus-lite sends the vectors as well
                search_params={"metric_type": "IP", "params": parameters},
                consistency_level="Strong",
                timeout=self.timeout,
            )
        )
        return [(np.array(each.ids, dtype=np.int64), each.distances[-1]) for each in answers]

    def _once_reachable(self, ask: Callable[[], Any]) -> Any:
        """Asks a server again that cannot be reached, for as long as a request may take: one that
        restarts is back within seconds, with nothing loaded, but its client refuses at once."""
        exception = _import_pymilvus().MilvusException
        given_up = monotonic() + self.timeout
        while True:
            try:
                return ask()
            except exception as error:
                if error.code not in (_NOT_REACHED, _NOT_LOADED) or monotonic() > given_up:
                    raise
                sleep(_PAUSE)
                if error.code == _NOT_LOADED:
                    self._load()


def _import_pymilvus() -> Any:
    try:
        import pymilvus
    except ImportError:
        raise ImportError(
            'MilvusRetriever needs pymilvus: pip install "hf_refspec[milvus]"'
        ) from None
    return pymilvus
