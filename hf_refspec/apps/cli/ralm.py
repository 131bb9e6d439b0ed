"""`hf-refspec ralm`: a model answers questions from texts, and retrieves as it writes."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import shorten
from typing import Any, Literal

import torch
from rich.text import Text
from transformers import PreTrainedTokenizerBase, TextStreamer

from ...ralm.checked_search import RetrievalError
from ...ralm.iterative import iterative_ralm
from ...ralm.stats import RetrievalStats
from ...retrieval.bm25 import SparseRetriever
from ...retrieval.dense import DenseRetriever
from ...retrieval.knowledge_base import KnowledgeBase
from ...retrieval.retriever import Retriever
from ...retrieval.text_encoder import load_encoder
from ...store.printable import printable
from ..shared.comparison import Comparison, Methods, decode
from ..shared.console import Terminal
from ..shared.loading import load_model, load_tokenizer
from ..shared.prompts import question_inputs
from .answering import quieten_transformers
from .arguments import add_model, add_source, check_source, load_corpus, positive
from .text_files import text_files

EXCERPT = 160  # characters of a passage


def add_ralm(parser: ArgumentParser) -> None:
    parser.set_defaults(run=_ralm)
    add_source(parser)
    add = parser.add_argument
    add("--knowledge-base", help="an existing one, or where to build it; by default it is not kept")
    add("--question", action="append", required=True, metavar="TEXT", help="can be repeated")
    add_model(parser)
    add("--retriever", choices=("bm25", "dense", "hnsw"), default="bm25")
    add("--encoder", help="a sentence-transformers model, folder or Hub id, for dense and hnsw")
    add("--max-new-tokens", type=positive, default=64, metavar="N")
    add(
        "--compare",
        action="store_true",
        help="generate with and without speculation once more, and compare ids and speed",
    )


def _ralm(args: Namespace) -> int:
    """Prints answers and how they came about; returns 1 if speculation has changed one."""
    quieten_transformers()
    _check(args)
    tokenizer = load_tokenizer(args.model)
    encoder = None if args.encoder is None else load_encoder(args.encoder)
    model = load_model(args.model, args.device_map, args.dtype)
    console = Terminal(soft_wrap=True)
    with TemporaryDirectory() as folder:
        base = _knowledge_base(args, tokenizer, encoder, Path(folder) / "base")
        print(
            f"{len(base):,} passages of at most {base.config.chunk_length} tokens out of "
            f"{printable(base.config.source.get('corpus') or 'texts')}, searched by "
            f"{args.retriever}",
            flush=True,
        )
        options = {
            "custom_generate": iterative_ralm,
            "retriever": _open_retriever(args, base, encoder),
            "tokenizer": tokenizer,
            "max_new_tokens": args.max_new_tokens,
        }
        methods: Methods = {"baseline": {"speculation": None}, "speculated": {}}
        comparison = Comparison(model, lambda: methods, **options)
        try:
            for question in args.question:
                console.print(Text(f"\n── {question}", "dim"))
                inputs = question_inputs(tokenizer, question).to(model.device)
                stats = RetrievalStats()
                streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
                torch.manual_seed(len(comparison.calls["baseline"]))
                decode(model, inputs, **options, streamer=streamer, retrieval_stats=stats)
                _print_passages(console, base, stats)
                console.print(Text(f"  retrieval   {stats}"))
                if args.compare:
                    comparison.ask(inputs)
        except RetrievalError as error:
            raise ValueError(str(error)) from error
    return comparison.report(console) if args.compare else 0


def _print_passages(console: Terminal, base: KnowledgeBase, stats: RetrievalStats) -> None:
    """Prints each passage once, in the order of first use."""
    for passage_id in dict.fromkeys(stats.best_ids):
        steps = [str(i) for i, best in enumerate(stats.best_ids, 1) if best == passage_id]
        name = f"{passage_id}, {printable(base.source(passage_id))}"
        console.print(Text(f"  passage {name}: steps {', '.join(steps)} of {stats.steps}"))
        words = printable(" ".join(base.text(passage_id).split()))
        console.print(Text(f"    {shorten(words, EXCERPT, placeholder=' …')}", "dim"))


def _check(args: Namespace) -> None:
    """Raises `ValueError` for options that contradict each other, before anything is loaded."""
    texts = bool(args.source or args.dataset or args.preset)
    if texts or args.knowledge_base is None:
        check_source(args)
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
    if any(not question.strip() for question in args.question):
        raise ValueError("--question is empty; give the text that the model is to go on from")


def _knowledge_base(
    args: Namespace, tokenizer: PreTrainedTokenizerBase, encoder: Any, temporary: Path
) -> KnowledgeBase:
    """Builds the knowledge base, or opens an existing one."""
    license = None
    if args.source:
        documents: Any = text_files(args.source, args.pattern)
        corpus: str | None = ", ".join(path.resolve().name for path in args.source)
    elif args.dataset or args.preset:
        documents, corpus, license = load_corpus(args)
    else:
        try:
            return KnowledgeBase.from_pretrained(str(args.knowledge_base), tokenizer)
        except (OSError, ValueError) as error:
            raise ValueError(f"--knowledge-base cannot be opened: {error}") from error
    path = args.knowledge_base or temporary
    return KnowledgeBase.build(
        documents, tokenizer, encoder, path, column=args.column, corpus=corpus, license=license
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
        retriever.encode(base.passage(0))  # fails if these embeddings are another encoder's
    except ValueError as error:
        raise ValueError(f"--encoder does not fit --knowledge-base: {error}") from error
    return retriever
