"""`hf-refspec ralm`: answers questions from a corpus, with speculative retrieval."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import shorten

import torch
from rich.text import Text
from transformers import TextStreamer

from ...corpus.untrusted import printable
from ...messages import counted
from ...ralm.checked_search import RalmError
from ...ralm.iterative import iterative_ralm
from ...ralm.stats import RalmStats
from ...retrieval.bm25 import SparseRetriever
from ...retrieval.knowledge_base import KnowledgeBase
from ..shared.comparison import Comparison, Methods, decode
from ..shared.loading import load_model, load_tokenizer
from ..shared.prompts import chat_inputs, user
from ..shared.streams import Terminal
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
