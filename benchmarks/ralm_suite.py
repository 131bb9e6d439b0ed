"""The retrievers of the suite `ralm`: iterative RaLM over a knowledge base."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import numpy as np
from retrieval_settings import BASELINE, OURS, Setting, retrieving_methods, speculations
from transformers import PreTrainedTokenizerBase

from hf_refspec.apps.bench.methods import Method
from hf_refspec.drafting.reference_copy import ReferenceCopy
from hf_refspec.ralm.iterative import iterative_ralm
from hf_refspec.retrieval.bm25 import SparseRetriever
from hf_refspec.retrieval.dense import DenseRetriever
from hf_refspec.retrieval.knowledge_base import KnowledgeBase
from hf_refspec.retrieval.milvus import MilvusRetriever
from hf_refspec.retrieval.retriever import Retriever
from hf_refspec.retrieval.text_encoder import TextEncoder, load_encoder

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
    """BM25 and, with an encoder, exact and approximate dense retrieval over a knowledge base."""
    base, encoder = _open(args, tokenizer)

    def setting(name: str, size: int, retriever: Any) -> Setting:
        return Setting(
            name, size, lambda: _methods(retriever(), args, tokenizer), base.config.chunk_length
        )

    def flat() -> Retriever:
        if not args.distractors:
            return DenseRetriever(base, encoder)
        return DenseRetriever(PaddedKnowledgeBase(base.path, tokenizer, args.distractors), encoder)

    settings = [setting("bm25", len(base), lambda: SparseRetriever(base, progress=False))]
    if encoder is not None:
        dense = [
            setting("flat", len(base) + args.distractors, flat),
            setting("hnsw", len(base), lambda: DenseRetriever(base, encoder, "hnsw")),
        ]
        if args.milvus is not None:
            milvus = MilvusRetriever(base, encoder, args.milvus, "hnsw")
            dense.append(setting("milvus", len(base), lambda: milvus))
        settings = [*dense, *settings]
    return settings


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
        if args.distractors or args.milvus:
            raise ValueError("--distractors and --milvus need --encoder, for the embeddings")
        return base, None
    encoder = load_encoder(args.encoder)
    TextEncoder(encoder).query("x", base.config.dimension)
    return base, encoder
