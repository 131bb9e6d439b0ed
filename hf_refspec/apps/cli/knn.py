"""`hf-refspec knn build`: builds a kNN datastore."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from ...corpus.untrusted import printable
from ...ralm.knn_datastore import KnnDatastore
from .arguments import add_model, add_source, load_for_corpus


def add_knn_build(parser: ArgumentParser) -> None:
    add_source(parser)
    add_model(parser)
    parser.add_argument("--out", type=Path, required=True, help="the new folder")
    parser.add_argument("--license", help="of the corpus, for the card")


def knn_build(args: Namespace) -> None:
    documents, tokenizer, model, about = load_for_corpus(args)
    store = KnnDatastore.build(documents, tokenizer, model, args.out, **about)
    print(args.out)
    print(f"  model       {printable(store.config.model)}, vocabulary {store.config.vocab_size:,}")
    print(f"  entries     {len(store):,} of {store.config.dimension} numbers")
