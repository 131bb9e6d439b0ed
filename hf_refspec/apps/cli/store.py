"""`hf-refspec store`: the commands that write or describe datastores."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from functools import partial
from pathlib import Path
from typing import Any

from ...retrieval.knowledge_base import KnowledgeBaseConfig
from ...store.datastore import Datastore
from ...store.datastore_config import StoreConfig
from ...store.files import DatastoreError
from ...store.names import load_tokenizer
from ...store.printable import printable
from .arguments import add_source, load_corpus, positive


def add_build(parser: ArgumentParser) -> None:
    parser.set_defaults(run=_build)
    add = parser.add_argument
    _add_corpus(parser)
    add("--tokenizer", help="a folder or a Hub id; SmolLM2-135M-Instruct's by default")
    add("--out", type=Path, required=True, help="the new folder")
    add("--shard-tokens", type=positive, default=32_000_000, metavar="N", help="32,000,000")
    add("--license", help="of the corpus, for the card")


def _build(args: Namespace) -> int:
    documents, corpus, license = load_corpus(args, args.streaming)
    if args.tokenizer is None:
        from ...smollm2 import default_model  # which loads torch

        args.tokenizer = default_model()
    store = Datastore.build(
        documents,
        load_tokenizer(args.tokenizer),
        args.out,
        shard_tokens=args.shard_tokens,
        license=args.license or license,
        corpus=corpus,
        **_options(args),
    )
    _print_info(store)
    return 0


def add_extend(parser: ArgumentParser) -> None:
    parser.set_defaults(run=_extend)
    parser.add_argument("store", help="the folder of the datastore")
    _add_corpus(parser)


def _extend(args: Namespace) -> int:
    store = Datastore(args.store)
    tokenizer = store.load_tokenizer()
    documents, _, _ = load_corpus(args, args.streaming)
    _print_info(store.extend(documents, tokenizer, **_options(args)))
    return 0


def add_merge(parser: ArgumentParser) -> None:
    parser.set_defaults(run=_merge)
    parser.add_argument("store", help="the folder of the datastore")


def _merge(args: Namespace) -> int:
    _print_info(Datastore(args.store).merge())
    return 0


def add_retokenize(parser: ArgumentParser) -> None:
    parser.set_defaults(run=_retokenize)
    add = parser.add_argument
    add("store", help="a folder or a Hub id, of a datastore with its full form")
    add("--tokenizer", required=True, help="the other model's, a folder or a Hub id")
    add("--out", type=Path, required=True, help="the new folder")


def _retokenize(args: Namespace) -> int:
    store = Datastore.from_pretrained(args.store, form="full")
    _print_info(store.retokenize(load_tokenizer(args.tokenizer), args.out))
    return 0


def add_compact(parser: ArgumentParser) -> None:
    parser.set_defaults(run=_compact)
    add = parser.add_argument
    add("store", help="the folder of the datastore")
    add("--out", type=Path, help="a new folder; by default it is added to the datastore")
    add("--max-bytes", type=positive, metavar="N", help="keep what is accepted most for its bytes")


def _compact(args: Namespace) -> int:
    _print_info(Datastore(args.store).compact(args.out, max_bytes=args.max_bytes))
    return 0


def add_info(parser: ArgumentParser) -> None:
    parser.set_defaults(run=_info)
    help = "a folder or a Hub id of a datastore, or the folder of a knowledge base"
    parser.add_argument("store", help=help)
    parser.add_argument("--verify", action="store_true", help="check the checksums of all files")


def _info(args: Namespace) -> int:
    path = Path(args.store)
    try:
        base = KnowledgeBaseConfig.read(path)
    except DatastoreError:
        store = Datastore.from_pretrained(args.store)
        _print_info(store)
        verify, when = store.verify, store.verified
    else:
        _print_origin(path, base)
        embeddings = f"embeddings of {base.dimension} numbers" if base.dimension else "for BM25"
        print(f"  passages    {base.passages:,}, {base.tokens:,} tokens, {embeddings}")
        verify, when = partial(base.verify, path), base.verified(path)
    if args.verify:
        verify()
        print("all files are as they were written")
    else:
        print(f"  verified    {f'{when:%Y-%m-%d %H:%M} UTC' if when else 'never'}")
    return 0


def _add_corpus(parser: ArgumentParser) -> None:
    """Adds the arguments that `build` and `extend` share."""
    add_source(parser)
    add = parser.add_argument
    add("--streaming", action="store_true", help="do not download the dataset first")
    add("--max-tokens", type=positive, metavar="N", help="stop after so many tokens")
    add("--deduplicate", action="store_true", help="drop repeated documents")
    add("--engine", choices=("local", "ray"), default="local")


def _options(args: Namespace) -> dict[str, Any]:
    """The keyword arguments of both `Datastore.build` and `Datastore.extend`."""
    names = ("column", "pattern", "max_tokens", "deduplicate", "engine")
    return {name: getattr(args, name) for name in names}


def _print_origin(path: Path, config: StoreConfig | KnowledgeBaseConfig) -> None:
    print(path)
    print(f"  corpus      {printable(config.source.get('corpus') or 'not stated')}")
    print(f"  licence     {printable(config.source.get('license') or 'not stated')}")
    name, fingerprint = printable(config.tokenizer), printable(config.fingerprint)
    print(f"  tokenizer   {name}, fingerprint {fingerprint}")
    print(f"  vocabulary  {config.vocab_size:,}")


def _print_info(store: Datastore) -> None:
    config = store.config
    _print_origin(store.path, config)
    if config.shards:
        size = sum(shard.tokens_file.size + shard.suffixes_file.size for shard in config.shards)
        shards = f"{len(config.shards)} shard{'s' * (len(config.shards) > 1)}"
        print(
            f"  full        {store.tokens:,} tokens, {store.documents:,} documents, {shards}, "
            f"{size / 1e6:.1f} MB, {size / store.tokens:.2f} bytes a token"
        )
    if config.ngrams:
        orders = ", ".join(f"{n:,}" for n in config.ngrams.ngrams)
        print(
            f"  compact     {sum(config.ngrams.ngrams):,} n-grams ({orders} of the orders 1, 2, "
            f"...), {config.ngrams.nodes:,} nodes, {config.ngrams.file.size / 1e6:.1f} MB, of "
            f"{config.ngrams.corpus_tokens:,} tokens"
        )
