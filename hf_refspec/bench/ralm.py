"""Iterative RaLM with speculative retrieval, against waiting for every search.

Recorded questions and answers are LLMA's and then Spec-Bench's; a model that says what it likes is
asked Spec-Bench's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from ..drafting.reference_copy import ReferenceCopy
from ..ralm.iterative import iterative_ralm
from ..ralm.stats import RetrievalStats
from ..retrieval.bm25 import SparseRetriever
from ..retrieval.dense import DenseRetriever
from ..retrieval.milvus import MilvusRetriever
from ..retrieval.retriever import Retriever
from ..store.build.text_encoder import TextEncoder, load_encoder
from ..store.knowledge_base import KnowledgeBase
from .distractors import PaddedKnowledgeBase
from .measure import NEW_TOKENS, Bench
from .retrieval_ways import (
    BATCHES,
    RetrievalWay,
    ablations,
    fixed_strides,
    main_ways,
    time_searches,
    time_ways,
    with_drafts,
    without_retrieval,
)
from .said import Said

GENERATION_STRIDE, QUERY_LENGTH = 4, 32  # those of the paper, section 5.1
PREFETCH = 20


class Retrievers:
    """The retrievers over a knowledge base: exact, approximate, sparse, and a server's.

    Args:
        folder (`str`): The knowledge base.
        tokenizer (`PreTrainedTokenizerBase`): The language model's.
        encoder (`str`, *optional*): A sentence-transformers model; BM25 alone needs none.
        distractors (`int`): How many the exact index is padded with.
        milvus (`str`, *optional*): The address or file of a Milvus to search as well,
            approximately.

    Attributes:
        warm (`set[str]`): Those that have been used.

    Raises:
        OSError, ValueError: If one of them cannot be opened, or they do not go together.
        ImportError: If a library is missing.
    """

    def __init__(
        self,
        folder: str,
        tokenizer: PreTrainedTokenizerBase,
        encoder: str | None,
        distractors: int,
        milvus: str | None,
    ) -> None:
        try:
            self._base = KnowledgeBase.from_pretrained(folder, tokenizer)
        except (OSError, ValueError) as error:
            raise ValueError(f"--knowledge-base {folder} cannot be opened: {error}") from error
        if distractors and encoder is None:
            raise ValueError(
                f"--distractors {distractors} are for the exact index, which needs --encoder"
            )
        if milvus is not None and encoder is None:
            raise ValueError(f"--milvus {milvus} holds embeddings, and so needs --encoder")
        for library, needed in (("bm25s", True), ("faiss", encoder is not None)):
            if needed and find_spec(library) is None:
                raise ImportError(f"the suite needs {library}; install the extra `retrieval`")
        self.warm: set[str] = set()
        self._distractors = distractors
        self._encoder = None if encoder is None else self._checked_encoder(encoder)
        self._milvus = None
        if milvus is not None:
            self._milvus = MilvusRetriever(self._base, self._encoder, milvus, "hnsw")

    @cached_property
    def by_name(self) -> dict[str, Retriever]:
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

    @property
    def names(self) -> list[str]:
        """Those of all of them."""
        dense = [] if self._encoder is None else ["flat", "hnsw"]
        return [*dense, *([] if self._milvus is None else ["milvus"]), "bm25"]

    @property
    def longest_passage(self) -> int:
        """The most tokens of a passage."""
        return self._base.config.chunk_length

    def passages(self, name: str) -> int:
        """How many passages one of them looks at."""
        return len(self._base) + (self._distractors if name == "flat" else 0)

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


@dataclass(frozen=True)
class RalmQuestion:
    """What is asked, of all retrievers.

    Attributes:
        id, name (`str`): What it is called; the id with the retriever.
        prompt_ids (`list[int]`): The question.
        answer_ids (`list[int]`, *optional*): The recorded answer, if it is to be forced.
        ablated (`bool`): Whether all ways are measured, or the main ones.
        retrievers ([`Retrievers`]): All questions have the same.
        runs (`int`): How often each way is measured.
        retriever (`str`): Which one it is asked with.
    """

    id: str
    name: str
    prompt_ids: list[int]
    answer_ids: list[int] | None
    ablated: bool
    retrievers: Retrievers
    runs: int
    retriever: str = ""


def with_each_retriever(question: RalmQuestion) -> list[RalmQuestion]:
    """A question once for each retriever."""
    return [
        replace(question, id=f"{question.name}, {name}", retriever=name)
        for name in question.retrievers.names
    ]


def measure_ralm(bench: Bench, question: RalmQuestion) -> Iterator[dict[str, Any]]:
    """Asks in all ways, and yields what comes of it.

    Raises:
        ContextTooShortError: If the model's context does not hold the question and its answer.
        IdsDifferError: If ids differ in float32.
    """
    new_tokens = NEW_TOKENS if question.answer_ids is None else len(question.answer_ids)
    longest_passage = question.retrievers.longest_passage
    bench.check_context(question.id, question.prompt_ids, new_tokens + longest_passage)
    name, retriever = question.retriever, question.retrievers.by_name[question.retriever]
    drafter = ReferenceCopy()
    ways = [*main_ways(), *with_drafts(), *without_retrieval(bench.takes_look_up)]
    to_warm = list(ways)
    if question.ablated:
        ways += [*ablations(), *fixed_strides()]

    def generate(way: RetrievalWay, stats: RetrievalStats) -> tuple[list[int], Callable[[], Said]]:
        if way.alone is not None:
            return bench.say(question.prompt_ids, question.answer_ids, **way.alone)
        return bench.say(
            question.prompt_ids,
            question.answer_ids,
            custom_generate=iterative_ralm,
            retriever=retriever,
            tokenizer=bench.tokenizer,
            generation_stride=GENERATION_STRIDE,
            query_length=QUERY_LENGTH,
            speculation=way.speculation,
            drafter=drafter if way.drafts else None,
            retrieval_stats=stats,
        )

    if name not in question.retrievers.warm:  # the first calls compile, probe and load
        question.retrievers.warm.add(name)
        for way in to_warm:
            generate(way, RetrievalStats())
    exact = bench.computes_exactly
    entry: dict[str, Any] = {
        "name": question.name,
        "retriever": name,
        "passages": question.retrievers.passages(name),
        "ablated": question.ablated,
        "runs": time_ways(question.id, ways, question.runs, generate, exact),
    }
    if question.ablated:
        new_ids, _ = generate(main_ways()[-1], RetrievalStats())
        text = np.array(question.prompt_ids + new_ids)
        entry["search_seconds"] = _search_seconds(retriever, text)
    yield entry


def _search_seconds(retriever: Retriever, text: np.ndarray) -> dict[str, list[float]]:
    """How long a search for some queries takes, those of steps that follow each other."""
    ends = [max(len(text) - GENERATION_STRIDE * i, 1) for i in reversed(range(BATCHES[-1]))]
    queries = [retriever.encode(text[max(end - QUERY_LENGTH, 0) : end]) for end in ends]
    return time_searches(retriever, queries, PREFETCH)
