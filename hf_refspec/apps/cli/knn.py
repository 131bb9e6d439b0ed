"""`hf-refspec knn build`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from ...ralm.knn_datastore import KnnDatastore
from ...store.build.source import open_source
from ...store.printable import printable
from ...store.stored_tokenizer import vocabulary_size
from ..shared.loading import load_model, load_tokenizer
from .answering import quieten_transformers
from .arguments import add_model, add_source, load_corpus
from .text_files import text_files


def add_build(parser: ArgumentParser) -> None:
    parser.set_defaults(run=_build)
    add_source(parser)
    add_model(parser)
    parser.add_argument("--out", type=Path, required=True, help="the new folder")


def _build(args: Namespace) -> int:
    """Builds a kNN datastore, all of it or nothing, and prints its size."""
    quieten_transformers()
    if args.out.exists():
        raise FileExistsError(f"--out {args.out} exists; choose another path, or delete it")
    tokenizer = load_tokenizer(args.model)
    documents, _, _ = load_corpus(args)
    source = text_files(args.source, args.pattern) if args.source else documents
    opened = open_source(source, tokenizer, vocabulary_size(tokenizer), args.column)
    texts = [text for text in opened.documents if isinstance(text, str)]
    model = load_model(args.model, args.device_map, args.dtype)
    store = KnnDatastore.build(model, tokenizer, texts, args.out)
    print(args.out)
    print(f"  model       {printable(store.config.model)}, vocabulary {store.config.vocab_size:,}")
    print(f"  entries     {len(store):,} of {store.config.dimension} numbers")
    return 0
