"""`hf-refspec store`: the commands that build, compact, describe and publish datastores."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from ...corpus.untrusted import printable
from ...store.datastore import Datastore
from ...store.datastore_config import COLUMNS
from ...store.names import named_tokenizer
from .arguments import add_source, load_corpus, positive


def add_build(parser: ArgumentParser) -> None:
    add_source(parser)
    add = parser.add_argument
    add("--streaming", action="store_true", help="do not download the dataset first")
    add("--max-tokens", type=positive, metavar="N", help="stop after N tokens")
    add("--deduplicate", action="store_true", help="drop repeated documents")
    add("--tokenizer", help="a folder or a Hub id; SmolLM2-135M-Instruct's by default")
    add("--out", type=Path, required=True, help="the new folder")
    add("--shard-tokens", type=positive, default=32_000_000, metavar="N", help="of a shard")
    add("--name", help="of the corpus, for the card; by default its own")
    add("--license", help="its licence, for the card; by default what the corpus states")


def build(args: Namespace) -> None:
    documents, about = load_corpus(args)
    if args.tokenizer is None:
        from ...smollm2 import default_model  # loads torch

        args.tokenizer = default_model()
    options = {name: getattr(args, name) for name in ("max_tokens", "deduplicate", "shard_tokens")}
    store = Datastore.build(
        documents, named_tokenizer(args.tokenizer), args.out, **about, **options
    )
    _print_info(store)


def add_compact(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("store", help="the folder of the datastore")
    add("--out", type=Path, help="a new folder; by default it is added to the datastore")
    help = "keep the n-grams that gain most per byte; by default as many bytes as the full form"
    add("--max-bytes", type=positive, metavar="N", help=help)


def compact(args: Namespace) -> None:
    store = Datastore(args.store)
    _print_info(store.compact(args.out, max_bytes=args.max_bytes))
    if args.out is not None:
        print(f"  made from   {store.config.card_texts()['full_form']}")


def add_push(parser: ArgumentParser) -> None:
    parser.add_argument("store", help="the folder of the datastore")
    parser.add_argument("repo", help='the name of the dataset repo on the Hub, "user/name"')
    help = "make a new repository private"
    parser.add_argument("--private", action="store_true", default=None, help=help)


def push(args: Namespace) -> None:
    store = Datastore(args.store)
    print(store.push_to_hub(args.repo, private=args.private).repo_url)


def add_info(parser: ArgumentParser) -> None:
    parser.add_argument("store", help="a folder or a Hub id of a datastore")
    parser.add_argument("--verify", action="store_true", help="check the checksums of all files")


def info(args: Namespace) -> None:
    store = Datastore.from_pretrained(args.store)
    _print_info(store)
    if args.verify:
        store.verify()
        print("all files are as they were written")


def _print_info(store: Datastore) -> None:
    config = store.config
    print(store.path)
    for label, name in (("corpus", "corpus"), ("licence", "license")):
        print(f"  {label:11} {printable(config.source.get(name) or 'not stated')}")
    fingerprint = printable(config.fingerprint)
    print(f"  tokenizer   {printable(config.tokenizer)}, fingerprint {fingerprint}")
    print(f"  vocabulary  {config.vocab_size:,}")
    texts = config.card_texts()
    for name in ("documents", "full_form", "compact_form"):
        if texts[name] != "none":
            print(f"  {name.removesuffix('_form'):11} {texts[name]}")
    for row in config.measured:
        entries = [f"{name} {row[name]}" for name in COLUMNS if name in row]
        print("  measured   ", printable(", ".join(entries)))
