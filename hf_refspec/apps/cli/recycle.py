"""`hf-refspec store recycle`: builds a recycling table."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from ...drafting.token_recycling import TokenRecycling
from ...store.printable import printable
from ...store.recycling_table import RecyclingTable
from ..shared.loading import load
from .answering import quieten_transformers
from .arguments import add_model, add_source, check_source, load_corpus, positive


def add_recycle(parser: ArgumentParser) -> None:
    parser.set_defaults(run=_recycle)
    add_source(parser)
    add = parser.add_argument
    add_model(parser)
    add("--out", type=Path, required=True, help="the new folder")
    add("--max-tokens", type=positive, metavar="N", help="read about so many tokens")
    add("--license", help="of the corpus, for the card")


def _recycle(args: Namespace) -> int:
    check_source(args)
    if args.out.exists():
        raise FileExistsError(f"{args.out} exists; choose another path, or delete it")
    for path in args.source:  # before the model is loaded
        if not path.exists():
            raise FileNotFoundError(f"{path} is neither a file nor a folder")
    documents, corpus, license = load_corpus(args, streaming=True)
    quieten_transformers()
    model, tokenizer = load(args.model, args.device_map, args.dtype)
    options = {name: getattr(args, name) for name in ("max_tokens", "column", "pattern")}
    table = TokenRecycling.build(
        model, tokenizer, documents, corpus=corpus, license=args.license or license, **options
    )
    table.save_pretrained(args.out)
    config = RecyclingTable(args.out, tokenizer).config
    print(args.out)
    print(f"  model       {printable(config.model)}, vocabulary {config.vocab_size:,}")
    print(f"  corpus      {printable(config.source.get('corpus'))}")
    print(
        f"  contexts    {config.contexts:,} of up to {config.context} tokens, with "
        f"{config.top_k} next tokens each, {config.table_file.size / 1e6:.1f} MB"
    )
    return 0
