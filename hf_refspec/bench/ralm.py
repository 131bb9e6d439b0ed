"""Iterative RaLM: the retrievers over a knowledge base, as [`Searched`]."""

from __future__ import annotations

from functools import cached_property
from importlib.util import find_spec
from typing import Any

from ..drafting.reference_copy import ReferenceCopy
from ..ralm.iterative import iterative_ralm
from ..retrieval.bm25 import SparseRetriever
from ..retrieval.dense import DenseRetriever
from ..retrieval.milvus import MilvusRetriever
from ..retrieval.retriever import Retriever
from ..store.build.text_encoder import TextEncoder, load_encoder
from ..store.knowledge_base import KnowledgeBase
from .distractors import PaddedKnowledgeBase
from .measure import Bench
from .methods import BASELINE, OURS, Method, main_speculations, retrieving_methods
from .options import BenchOptions
from .retrieval import Searched

GENERATION_STRIDE, QUERY_LENGTH = 4, 32  # those of the paper, section 5.1
WITH_DRAFTS = " + ReferenceCopy"


class Retrievers(Searched):
    """The retrievers over a knowledge base: exact, approximate, a server's, and sparse.

    Args:
        options ([`BenchOptions`]): Which.
        tokenizer (`PreTrainedTokenizerBase`): The language model's.

    Raises:
        OSError, ValueError: If one of them cannot be opened, or they do not go together.
        ImportError: If a library is missing.
    """

    def __init__(self, options: BenchOptions, tokenizer: Any) -> None:
        folder, encoder = options.knowledge_base, options.encoder
        if folder is None:
            raise ValueError("ralm retrieves passages: name a knowledge base with --knowledge-base")
        try:
            self._base = KnowledgeBase.from_pretrained(folder, tokenizer)
        except (OSError, ValueError) as error:
            raise ValueError(f"--knowledge-base {folder} cannot be opened: {error}") from error
        if options.distractors and encoder is None:
            raise ValueError(
                f"--distractors {options.distractors} are for the exact index, which needs "
                "--encoder"
            )
        if options.milvus is not None and encoder is None:
            raise ValueError(f"--milvus {options.milvus} holds embeddings, and so needs --encoder")
        for library, needed in (("bm25s", True), ("faiss", encoder is not None)):
            if needed and find_spec(library) is None:
                raise ImportError(f"the suite needs {library}; install the extra `retrieval`")
        self._distractors = options.distractors
        self._encoder = None if encoder is None else self._checked_encoder(encoder)
        self._milvus = None
        if options.milvus is not None:
            self._milvus = MilvusRetriever(self._base, self._encoder, options.milvus, "hnsw")
        dense = [] if encoder is None else ["flat", "hnsw"]
        self.settings = [*dense, *([] if self._milvus is None else ["milvus"]), "bm25"]
        self.longest_passage = self._base.config.chunk_length

    def size(self, setting: str) -> int:
        """How many passages a retriever looks at."""
        return len(self._base) + (self._distractors if setting == "flat" else 0)

    def options(self, setting: str, bench: Bench) -> dict[str, Any]:
        """Of `iterative_ralm`."""
        return {
            "custom_generate": iterative_ralm,
            "retriever": self._by_name[setting],
            "tokenizer": bench.tokenizer,
            "generation_stride": GENERATION_STRIDE,
            "query_length": QUERY_LENGTH,
        }

    def methods(self, setting: str, bench: Bench) -> list[Method]:
        """The baseline and ours once more with tokens drafted beside it."""
        main, options = main_speculations(), self.options(setting, bench)
        with_drafts = {f"{name}{WITH_DRAFTS}": main[name] for name in (BASELINE, OURS)}
        return [
            *super().methods(setting, bench),
            *retrieving_methods(with_drafts, **options, drafter=ReferenceCopy()),
        ]

    @cached_property
    def _by_name(self) -> dict[str, Retriever]:
        """All of them, made when they are first needed, which takes a while."""
        made: dict[str, Retriever] = {}
        if self._encoder is not None:
            base = self._base
            if self._distractors:
                base = PaddedKnowledgeBase(base.path, base.tokenizer, self._distractors)
            made["flat"] = DenseRetriever(base, self._encoder)
            made["hnsw"] = DenseRetriever(self._base, self._encoder, "hnsw")
        if self._milvus is not None:
            made["milvus"] = self._milvus
        made["bm25"] = SparseRetriever(self._base, progress=False)
        return made

    def _checked_encoder(self, name: str) -> Any:
        """The encoder, after it has encoded something as it must."""
        if self._base.embeddings is None:
            raise ValueError(
                f"--encoder {name} is of no use: {self._base.path} was built without embeddings"
            )
        try:
            encoder = load_encoder(name)
            TextEncoder(encoder).query("x", self._base.config.dimension)
        except (ValueError, RuntimeError) as error:
            raise ValueError(f"--encoder {name} does not fit: {error}") from error
        return encoder
