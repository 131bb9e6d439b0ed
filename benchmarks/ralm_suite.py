"""The retrievers of the suite `ralm`: iterative RaLM over a knowledge base."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from retrieval_settings import (
    BASELINE,
    LARGE_PREFETCH,
    OURS,
    Setting,
    retrieving_methods,
    speculations,
)
from transformers import PreTrainedTokenizerBase

from hf_refspec.apps.bench.methods import Method
from hf_refspec.apps.cli.arguments import positive
from hf_refspec.drafting.reference_copy import ReferenceCopy
from hf_refspec.ralm.iterative import iterative_ralm
from hf_refspec.retrieval.bm25 import SparseRetriever
from hf_refspec.retrieval.dense import DenseRetriever
from hf_refspec.retrieval.knowledge_base import KnowledgeBase
from hf_refspec.retrieval.retriever import Retriever
from hf_refspec.retrieval.text_encoder import TextEncoder, load_encoder
from hf_refspec.retrieval.vector_index import LEAST_WALKED

GENERATION_STRIDE, QUERY_LENGTH = 4, 32  # of the paper (arXiv 2401.14021), section 5.1
WITH_DRAFTS = " + ReferenceCopy"


class PaddedKnowledgeBase(KnowledgeBase):
    """A knowledge base with random embeddings added, so that exact searches take longer.

    In hundreds of dimensions random directions are nearly orthogonal to every query: searches
    compare them with it, but hardly ever return them.
    """

    def __init__(self, path: Any, tokenizer: PreTrainedTokenizerBase, distractors: int) -> None:
        super().__init__(path, tokenizer)
        assert self.embeddings is not None
        count, dimension = self.embeddings.shape
        padded = np.empty((count + distractors, dimension), dtype=np.float32)
        padded[:count] = self.embeddings
        np.random.default_rng(0).standard_normal(dtype=np.float32, out=padded[count:])
        squares = np.einsum("ij,ij->i", padded[count:], padded[count:])  # without a copy of all
        padded[count:] /= np.sqrt(squares)[:, None]
        self.embeddings = padded

    def __len__(self) -> int:
        assert self.embeddings is not None
        return len(self.embeddings)

    def passage(self, passage_id: int) -> np.ndarray:
        """The tokens of a passage; of a distractor, the first tokens of passage 0."""
        if self.config.passages <= passage_id < len(self):
            return super().passage(0)[:4]
        return super().passage(passage_id)


def ralm_settings(args: Namespace, tokenizer: PreTrainedTokenizerBase) -> list[Setting]:
    """A setting for each retriever."""

    def setting(name: str, searched: Searched) -> Setting:
        return Setting(
            name,
            searched.size,
            lambda: _methods(searched.new_retriever(), args, tokenizer),
            searched.chunk_length,
        )

    # To ablate, a graph walks as many for the baseline too.
    ef_search = LARGE_PREFETCH if args.ablate else LEAST_WALKED
    return [setting(*each) for each in retrievers(args, tokenizer, ef_search).items()]


def add_retrievers(parser: ArgumentParser) -> None:
    """Adds the arguments of [`retrievers`]."""
    add = parser.add_argument
    add("--knowledge-base", metavar="PATH", help="ralm: a folder or a Hub id")
    add("--encoder", metavar="PATH", help="ralm: the sentence-transformers model that embedded it")
    add("--distractors", type=positive, default=0, metavar="N", help="add N random vectors")


class Searched(NamedTuple):
    """What is searched, and how."""

    size: int  # passages
    chunk_length: int
    new_retriever: Callable[[], Any]  # building an index takes time


def retrievers(
    args: Namespace, tokenizer: PreTrainedTokenizerBase, ef_search: int = LEAST_WALKED
) -> dict[str, Searched]:
    """BM25 and, with an encoder, exact and approximate dense retrieval over a knowledge base."""
    base, encoder = _open(args, tokenizer)

    def searched(retriever: Callable[[], Any], distractors: int = 0) -> Searched:
        return Searched(len(base) + distractors, base.config.chunk_length, retriever)

    def flat() -> Retriever:
        if not args.distractors:
            return DenseRetriever(base, encoder)
        return DenseRetriever(PaddedKnowledgeBase(base.path, tokenizer, args.distractors), encoder)

    all_retrievers = {}
    if encoder is not None:
        all_retrievers["flat"] = searched(flat, args.distractors)
        hnsw = partial(DenseRetriever, base, encoder, "hnsw", ef_search)
        all_retrievers["hnsw"] = searched(hnsw)
    all_retrievers["bm25"] = searched(lambda: SparseRetriever(base, progress=False))
    return all_retrievers


def _methods(
    retriever: Retriever, args: Namespace, tokenizer: PreTrainedTokenizerBase
) -> list[Method]:
    """All settings of speculation, and two of them with token drafts as well."""
    options = {
        "custom_generate": iterative_ralm,
        "retriever": retriever,
        "tokenizer": tokenizer,
        "generation_stride": GENERATION_STRIDE,
        "query_length": QUERY_LENGTH,
    }
    settings = speculations(args.ablate)
    with_drafts = {f"{name}{WITH_DRAFTS}": settings[name] for name in (BASELINE, OURS)}
    return [
        *retrieving_methods(settings, **options),
        *retrieving_methods(with_drafts, **options, drafter=ReferenceCopy()),
    ]


def _open(args: Namespace, tokenizer: PreTrainedTokenizerBase) -> tuple[KnowledgeBase, Any]:
    """The knowledge base, and the encoder if one is named, which must fit."""
    base = KnowledgeBase.from_pretrained(args.knowledge_base, tokenizer)
    if args.encoder is None:
        if args.distractors:
            raise ValueError("--distractors needs --encoder, for the embeddings")
        return base, None
    encoder = load_encoder(args.encoder)
    TextEncoder(encoder).query("x", base.config.dimension)
    return base, encoder
