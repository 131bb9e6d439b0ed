"""`hf-refspec ralm`: a model answers questions from texts, and retrieves as it writes."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from ...drafting.reference_copy import ReferenceCopy
from ...ralm.iterative import iterative_ralm
from ...ralm.options import Speculation
from ...retrieval.bm25 import SparseRetriever
from ...retrieval.dense import DenseRetriever
from ...retrieval.knowledge_base import KnowledgeBase
from ...retrieval.retriever import Retriever
from ...retrieval.text_encoder import load_encoder
from ...store.printable import printable
from ..shared.default_model import HUB_ID, load_model, load_tokenizer
from . import ralm_answers
from .answering import quieten_transformers, read_text
from .arguments import add_source, load_dataset, positive
from .text_files import text_files

DEFAULT_CHUNK_LENGTH = 256


def add_ralm(parser: ArgumentParser) -> None:
    """Adds the arguments of `hf-refspec ralm`."""
    parser.set_defaults(run=_ralm)
    add_source(parser)
    add = parser.add_argument
    add("--chunk-length", type=positive, metavar="N", help="of a passage, in tokens")
    add("--knowledge-base", help="an existing one, or where to build it; by default it is not kept")
    add("--question", action="append", default=[], metavar="TEXT", help="can be repeated")
    add("--question-file", type=Path, metavar="FILE", help="one question per line")
    add("--model", help=f"a folder or a Hub id; default: {HUB_ID}")
    add("--retriever", choices=("bm25", "dense", "hnsw"), default="bm25")
    add("--encoder", help="a sentence-transformers model, folder or Hub id, for dense and hnsw")
    add("--max-new-tokens", type=positive, default=64, metavar="N")
    add("--generation-stride", type=positive, default=4, metavar="N", help="tokens per retrieval")
    add(
        "--speculation",
        default="psa",
        metavar="LETTERS",
        help="p: prefetching, s: stride scheduler, a: asynchronous verification; none: wait for "
        "every search",
    )
    add(
        "--compare",
        action="store_true",
        help="generate twice each way as well, speculating and waiting, and compare ids and speed",
    )
    add("--copy", action="store_true", help="draft tokens from the passages as well")


def _ralm(args: Namespace) -> int:
    """Prints answers and how they came about; returns 1 if speculation has changed one."""
    quieten_transformers()
    _check(args)
    questions = _questions(args)
    tokenizer = load_tokenizer(args.model)
    encoder = None if args.encoder is None else load_encoder(args.encoder)
    model = load_model(args.model)
    with TemporaryDirectory() as folder:
        base = _knowledge_base(args, tokenizer, encoder, Path(folder) / "base")
        print(
            f"{len(base):,} passages of at most {base.config.chunk_length} tokens out of "
            f"{printable(base.config.source.get('corpus') or 'texts')}, searched by "
            f"{args.retriever}",
            flush=True,
        )
        generating = {
            "custom_generate": iterative_ralm,
            "retriever": _open_retriever(args, base, encoder),
            "tokenizer": tokenizer,
            "generation_stride": args.generation_stride,
            "max_new_tokens": args.max_new_tokens,
        }
        drafter = ReferenceCopy() if args.copy else None
        speculating = {"speculation": _speculation(args), "drafter": drafter}
        answers = ralm_answers.Answers(model, base, generating, speculating, args.compare)
        for question in questions:
            answers.print_question(question)
            answers.ask(question)
        if not questions:
            answers.converse()
        answers.print_summary()
    return 0 if answers.identical else 1


def _check(args: Namespace) -> None:
    """Raises `ValueError` for options that contradict each other, before anything is loaded."""
    texts = bool(args.source) or args.dataset is not None
    if args.source and args.dataset is not None:
        raise ValueError("give files and folders or --dataset NAME, not both")
    if not texts and args.knowledge_base is None:
        raise ValueError(
            "give what to build a knowledge base from, files and folders or --dataset NAME, "
            "or an existing one with --knowledge-base"
        )
    if not texts and args.chunk_length is not None:
        raise ValueError(
            f"--chunk-length {args.chunk_length} is for building: the passages of "
            f"--knowledge-base {args.knowledge_base} are cut already; leave it out"
        )
    if texts and args.knowledge_base is not None and Path(args.knowledge_base).exists():
        raise ValueError(
            f"--knowledge-base {args.knowledge_base} exists; leave the texts out to open it, "
            "or give a new path to build it at"
        )
    if args.retriever != "bm25" and args.encoder is None:
        raise ValueError(
            f"--retriever {args.retriever} needs --encoder, a sentence-transformers model "
            "(folder or Hub id); --retriever bm25 needs none"
        )
    if args.retriever == "bm25" and args.encoder is not None:
        raise ValueError(
            f"--encoder {args.encoder} is of no use to --retriever bm25; choose dense or hnsw"
        )
    if args.compare and args.speculation == "none":
        raise ValueError(
            "--compare compares speculation with waiting for every search, which is what "
            "--speculation none does; leave one of them out"
        )
    Speculation.parse(_speculation(args))


def _speculation(args: Namespace) -> str | None:
    """What --speculation says, as `iterative_ralm` takes it."""
    return None if args.speculation == "none" else args.speculation


def _questions(args: Namespace) -> list[str]:
    """The questions that were given; none if they are to be typed."""
    questions = list(args.question)
    if any(not question.strip() for question in questions):
        raise ValueError("--question is empty; give the text that the model is to go on from")
    if args.question_file is not None:
        lines = read_text(args.question_file, "--question-file").splitlines()
        questions += [line for line in lines if line.strip()]
    if not questions and not sys.stdin.isatty():
        raise ValueError(
            "there is no question and no terminal to type one: give --question or --question-file"
        )
    return questions


def _knowledge_base(
    args: Namespace, tokenizer: PreTrainedTokenizerBase, encoder: Any, temporary: Path
) -> KnowledgeBase:
    """Builds the knowledge base, or opens an existing one."""
    if args.source:
        documents: Any = text_files(args.source, args.pattern)
        corpus = ", ".join(path.resolve().name for path in args.source)
    elif args.dataset is not None:
        documents, corpus = load_dataset(args), None
    else:
        try:
            return KnowledgeBase.from_pretrained(str(args.knowledge_base), tokenizer)
        except (OSError, ValueError) as error:
            raise ValueError(f"--knowledge-base cannot be opened: {error}") from error
    return KnowledgeBase.build(
        documents,
        tokenizer,
        encoder,
        args.knowledge_base or temporary,
        chunk_length=args.chunk_length or DEFAULT_CHUNK_LENGTH,
        column=args.column,
        corpus=corpus,
    )


def _open_retriever(args: Namespace, base: KnowledgeBase, encoder: Any) -> Retriever:
    if args.retriever == "bm25":
        return SparseRetriever(base)
    if base.embeddings is None:
        raise ValueError(
            f"--retriever {args.retriever} needs embeddings, and --knowledge-base {base.path} "
            "was built without an encoder; build another with --encoder, or take --retriever "
            "bm25"
        )
    index: Literal["flat", "hnsw"] = "flat" if args.retriever == "dense" else "hnsw"
    retriever = DenseRetriever(base, encoder, index=index)
    try:
        retriever.encode(base.passage(0))  # shows whether it is the encoder of these embeddings
    except ValueError as error:
        raise ValueError(f"--encoder does not fit --knowledge-base: {error}") from error
    return retriever
