"""`hf-refspec ralm`: a model answers questions out of texts, and retrieves as it writes."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal

from transformers import PreTrainedTokenizerBase

from ..demo.default_model import load_model, load_tokenizer
from ..drafting.reference_copy import ReferenceCopy
from ..options import Option
from ..ralm.iterative import iterative_ralm
from ..ralm.options import Speculation
from ..retrieval.bm25 import SparseRetriever
from ..retrieval.dense import DenseRetriever
from ..retrieval.retriever import Retriever
from ..store.build.text_encoder import load_encoder
from ..store.knowledge_base import KnowledgeBase
from . import ralm_answers
from .source import Source
from .text_files import text_files

DEFAULT_CHUNK_LENGTH = 256


@dataclass(frozen=True, kw_only=True)
class Ralm(Source):
    """Prints answers and how they came about; returns 1 if speculation has changed one."""

    chunk_length: Annotated[int | None, Option("of a passage, in tokens")] = None
    knowledge_base: Annotated[
        str | None, Option("one that there is, or where to build it (else it is not kept)")
    ] = None
    question: Annotated[
        list[str], Option("can be given repeatedly", action="append", metavar="TEXT")
    ] = field(default_factory=list)
    question_file: Annotated[Path | None, Option("a question a line", metavar="FILE")] = None
    model: Annotated[str | None, Option("a folder or a Hub id instead of the bundled model")] = None
    retriever: Annotated[Literal["bm25", "dense", "hnsw"], Option()] = "bm25"
    encoder: Annotated[
        str | None, Option("a sentence-transformers model, folder or Hub id, for dense and hnsw")
    ] = None
    max_new_tokens: Annotated[int, Option()] = 64
    generation_stride: Annotated[int, Option("tokens between two retrievals")] = 4
    speculation: Annotated[
        str,
        Option(
            "p: prefetching, s: stride scheduler, a: asynchronous verification", metavar="LETTERS"
        ),
    ] = "psa"
    copy: Annotated[bool, Option("draft tokens from the passages, too")] = False

    def run(self) -> int:
        self._check()
        questions = self._questions()
        tokenizer = load_tokenizer(self.model)
        encoder = None if self.encoder is None else load_encoder(self.encoder)
        model = load_model(self.model)
        with TemporaryDirectory() as folder:
            base = self._knowledge_base(tokenizer, encoder, Path(folder) / "base")
            print(
                f"{len(base):,} passages of at most {base.config.chunk_length} tokens out of "
                f"{base.config.source.get('corpus') or 'texts'}, searched by {self.retriever}",
                flush=True,
            )
            generating = {
                "custom_generate": iterative_ralm,
                "retriever": self._open_retriever(base, encoder),
                "tokenizer": tokenizer,
                "generation_stride": self.generation_stride,
                "max_new_tokens": self.max_new_tokens,
            }
            drafter = ReferenceCopy() if self.copy else None
            speculating = {"speculation": self.speculation, "drafter": drafter}
            answers = ralm_answers.Answers(model, base, generating, speculating)
            for question in questions:
                answers.print_question(question)
                answers.ask(question)
            if not questions:
                answers.converse()
            answers.print_summary()
        return 0 if all(comparison.identical for comparison in answers.comparisons) else 1

    def _check(self) -> None:
        """Refuses what does not go together, before anything is loaded."""
        texts = bool(self.source) or self.dataset is not None
        if self.source and self.dataset is not None:
            raise ValueError("give files and folders or --dataset NAME, not both")
        if not texts and self.knowledge_base is None:
            raise ValueError(
                "give what to build a knowledge base from, files and folders or --dataset NAME, "
                "or one that there is, with --knowledge-base"
            )
        if not texts and self.chunk_length is not None:
            raise ValueError(
                f"--chunk-length {self.chunk_length} is for building: the passages of "
                f"--knowledge-base {self.knowledge_base} are cut already; leave it out"
            )
        if texts and self.knowledge_base is not None and Path(self.knowledge_base).exists():
            raise ValueError(
                f"--knowledge-base {self.knowledge_base} exists; leave the texts out to open it, "
                "or give a new path to build it at"
            )
        if self.retriever != "bm25" and self.encoder is None:
            raise ValueError(
                f"--retriever {self.retriever} needs --encoder, a sentence-transformers model "
                "(folder or Hub id); --retriever bm25 needs none"
            )
        if self.retriever == "bm25" and self.encoder is not None:
            raise ValueError(
                f"--encoder {self.encoder} is of no use to --retriever bm25; choose dense or hnsw"
            )
        Speculation.parse(self.speculation)

    def _questions(self) -> list[str]:
        """Those that were given; none if they are to be typed."""
        questions = list(self.question)
        if any(not question.strip() for question in questions):
            raise ValueError("--question is empty; give the text that the model is to go on from")
        if self.question_file is not None:
            lines = self.question_file.read_text(encoding="utf-8").splitlines()
            questions += [line for line in lines if line.strip()]
            if not questions:
                raise ValueError(f"--question-file {self.question_file} has no question in it")
        if not questions and not sys.stdin.isatty():
            raise ValueError(
                "there is no question and no terminal to type one: give --question or "
                "--question-file"
            )
        return questions

    def _knowledge_base(
        self, tokenizer: PreTrainedTokenizerBase, encoder: Any, temporary: Path
    ) -> KnowledgeBase:
        """Builds the knowledge base, or opens the one that there is."""
        if self.source:
            documents: Any = text_files(self.source, self.pattern)
            corpus = ", ".join(path.resolve().name for path in self.source)
        elif self.dataset is not None:
            documents, corpus = self.load_dataset(), None
        else:
            try:
                return KnowledgeBase.from_pretrained(str(self.knowledge_base), tokenizer)
            except (OSError, ValueError) as error:
                raise ValueError(f"--knowledge-base cannot be opened: {error}") from error
        return KnowledgeBase.build(
            documents,
            tokenizer,
            encoder,
            self.knowledge_base or temporary,
            chunk_length=self.chunk_length or DEFAULT_CHUNK_LENGTH,
            column=self.column,
            corpus=corpus,
        )

    def _open_retriever(self, base: KnowledgeBase, encoder: Any) -> Retriever:
        if self.retriever == "bm25":
            return SparseRetriever(base)
        if base.embeddings is None:
            raise ValueError(
                f"--retriever {self.retriever} needs embeddings, and --knowledge-base {base.path} "
                "was built without an encoder; build another with --encoder, or take --retriever "
                "bm25"
            )
        index: Literal["flat", "hnsw"] = "flat" if self.retriever == "dense" else "hnsw"
        retriever = DenseRetriever(base, encoder, index=index)
        try:
            retriever.encode(base.passage(0))  # shows whether it is the encoder of these embeddings
        except ValueError as error:
            raise ValueError(f"--encoder does not fit --knowledge-base: {error}") from error
        return retriever
