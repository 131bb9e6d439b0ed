"""`hf-refspec store recycle`: learns a model's next tokens from texts."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from ...corpus.untrusted import printable
from ...drafting.token_recycling import TokenRecycling
from ...store.recycling_table import RecyclingTable
from .arguments import load_for_corpus, positive
from .knn import add_knn_build


def add_recycle(parser: ArgumentParser) -> None:
    add_knn_build(parser)
    parser.add_argument("--max-tokens", type=positive, metavar="N", help="read about N tokens")


def recycle(args: Namespace) -> None:
    documents, tokenizer, model, about = load_for_corpus(args, streaming=True)
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
