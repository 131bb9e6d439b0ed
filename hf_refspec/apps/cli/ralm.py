"""`hf-refspec ralm`, `knn build` and `store recycle`: models that read a corpus."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import shorten
from typing import Any

import torch
from rich.text import Text
from transformers import TextStreamer

from ...corpus.untrusted import printable
from ...drafting.token_recycling import TokenRecycling
from ...messages import counted
from ...ralm.checked_search import RalmError
from ...ralm.iterative import iterative_ralm
from ...ralm.knn_datastore import KnnDatastore
from ...ralm.stats import RalmStats
from ...retrieval.bm25 import SparseRetriever
from ...retrieval.knowledge_base import KnowledgeBase
from ...store.recycling_table import RecyclingTable
from ..shared.comparison import Comparison, Methods, decode
from ..shared.live_drafts import Terminal
from ..shared.loading import load_model, load_tokenizer
from ..shared.prompts import chat_inputs, user
from .arguments import add_model, add_source, load_corpus, positive

_EXCERPT = 160  # characters of a passage


def add_ralm(parser: ArgumentParser) -> None:
    add_source(parser)
    add = parser.add_argument
    add("--question", action="append", required=True, metavar="TEXT", help="can be repeated")
    add_model(parser)
    add("--max-new-tokens", type=positive, default=64, metavar="N", help="of each answer")
    help = "answer again with and without speculation, and compare ids and speed"
    add("--compare", action="store_true", help=help)


def ralm(args: Namespace) -> int:
    """Prints answers and their passages; returns 1 if speculation has changed an answer."""
    if not all(question.strip() for question in args.question):
        raise ValueError("--question is empty; give it a text")
    documents, about = load_corpus(args)
    tokenizer = load_tokenizer(args.model)
    model = load_model(args.model, args.device_map, args.dtype)
    console = Terminal(soft_wrap=True)
    with TemporaryDirectory() as folder:
        place = Path(folder) / "base"
        base = KnowledgeBase.build(documents, tokenizer, None, place, **about)
        name = printable(base.config.source["corpus"])
        length = base.config.chunk_length
        passages = counted(len(base), "passage")
        print(f"{passages} of at most {counted(length, 'token')} from {name}", flush=True)
        options = {"custom_generate": iterative_ralm, "retriever": SparseRetriever(base)}
        options |= {"tokenizer": tokenizer, "max_new_tokens": args.max_new_tokens}
        methods: Methods = {"baseline": {"speculation": None}, "speculated": {}}
        comparison = Comparison(model, lambda: methods, **options)
        try:
            for question in args.question:
                console.print(Text(f"\n── {question}", "dim"))
                inputs = chat_inputs(tokenizer, [user(question)]).to(model.device)
                stats = RalmStats()
                streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
                torch.manual_seed(len(comparison.calls["baseline"]))
                decode(model, inputs, **options, streamer=streamer, ralm_stats=stats)
                _print_passages(console, base, stats)
                console.print(Text(f"  retrieval   {stats}"))
                if args.compare:
                    comparison.ask(inputs)
        except RalmError as error:
            raise ValueError(str(error)) from error
    return comparison.report(console) if args.compare else 0


def _print_passages(console: Terminal, base: KnowledgeBase, stats: RalmStats) -> None:
    """Prints each passage once, in the order of first use."""
    for passage_id in dict.fromkeys(stats.best_ids):
        steps = [str(i) for i, best in enumerate(stats.best_ids, 1) if best == passage_id]
        name = f"{passage_id}, {printable(base.source(passage_id))}"
        console.print(Text(f"  passage {name}: steps {', '.join(steps)} of {stats.steps}"))
        words = printable(" ".join(base.text(passage_id).split()))
        console.print(Text(f"    {shorten(words, _EXCERPT, placeholder=' …')}", "dim"))


def add_knn_build(parser: ArgumentParser) -> None:
    add_source(parser)
    add_model(parser)
    parser.add_argument("--out", type=Path, required=True, help="the new folder")
    parser.add_argument("--license", help="of the corpus, for the card")


def _opened(args: Namespace, streaming: bool = False) -> tuple[Any, ...]:
    """Loads documents, tokenizer, model and options to build with; first refuses paths that cannot
    be read or written."""
    if args.out.exists():
        raise FileExistsError(f"--out {args.out} exists; choose another path, or delete it")
    documents, about = load_corpus(args, streaming)
    tokenizer = load_tokenizer(args.model)
    return documents, tokenizer, load_model(args.model, args.device_map, args.dtype), about


def knn_build(args: Namespace) -> None:
    documents, tokenizer, model, about = _opened(args)
    store = KnnDatastore.build(documents, tokenizer, model, args.out, **about)
    print(args.out)
    print(f"  model       {printable(store.config.model)}, vocabulary {store.config.vocab_size:,}")
    print(f"  entries     {len(store):,} of {store.config.dimension} numbers")


def add_recycle(parser: ArgumentParser) -> None:
    add_knn_build(parser)
    parser.add_argument("--max-tokens", type=positive, metavar="N", help="read about N tokens")


def recycle(args: Namespace) -> None:
    documents, tokenizer, model, about = _opened(args, streaming=True)
    about["max_tokens"] = args.max_tokens
    table = TokenRecycling.build(documents, tokenizer, model, **about)
    table.save_pretrained(args.out)
    config = RecyclingTable(args.out, tokenizer).config
    print(args.out)
    print(f"  model       {printable(config.model)}, vocabulary {config.vocab_size:,}")
    print(f"  corpus      {printable(config.source.get('corpus'))}")
    print(
        f"  contexts    {config.contexts:,} of up to {config.context} tokens, with "
        f"{config.top_k} next tokens each, {config.table_file.size / 1e6:.1f} MB"
    )
