"""`hf-refspec store`: the commands that build, compact, describe and publish datastores."""

import os
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from huggingface_hub import constants
from huggingface_hub.utils import disable_progress_bars
from rich.console import Console
from rich.markup import escape

from ...corpus.untrusted import printable
from ...messages import require
from ...store.datastore import Datastore
from ...store.datastore_config import COLUMNS
from ...store.names import ask_hub, is_here, named_tokenizer
from .arguments import log_to_stderr, positive


def add_build(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("source", nargs="*", type=Path, help="folders, and files of text, JSON(L), CSV or Parquet")
    add("--dataset", metavar="NAME", help="a dataset on the Hub or on disk")
    add("--config", metavar="NAME", help="the dataset's configuration")
    add("--split", default="train", help="the dataset's split")
    add("--column", help="the column with texts or chats; found by default")
    add("--pattern", default="*", help='which files of a folder, for example "*.md"')
    add("--streaming", action="store_true", help="do not download the dataset first")
    add("--max-tokens", type=positive, metavar="N", help="stop after N tokens")
    add("--deduplicate", action="store_true", help="drop repeated documents")
    add("--tokenizer", help="a folder or a Hub id; SmolLM2-135M-Instruct's by default")
    add("--out", type=Path, required=True, help="the new folder")
    add("--shard-tokens", type=positive, default=32_000_000, metavar="N", help="of a shard")
    add("--name", help="of the corpus, for the card; by default its own")
    add("--license", help="its licence, for the card; by default what the corpus states")


def build(args: Namespace) -> None:
    if bool(args.source) == (args.dataset is not None):
        raise ValueError("give one of: files or folders, --dataset NAME")
    documents = args.source[0] if len(args.source) == 1 else args.source
    if args.dataset is not None:
        documents = _load_dataset(args)
    tokenizer = args.tokenizer
    if tokenizer is None:
        from ...smollm2 import default_model  # loads torch

        tokenizer = default_model()
    store = Datastore.build(
        documents,
        named_tokenizer(tokenizer),
        args.out,
        column=args.column,
        pattern=args.pattern,
        max_tokens=args.max_tokens,
        deduplicate=args.deduplicate,
        shard_tokens=args.shard_tokens,
        corpus_name=args.name,
        license=args.license,
    )
    _print_info(store)


def _load_dataset(args: Namespace) -> Any:
    """Loads a dataset, from the cache if the Hub does not answer; a file stays a path."""
    name = args.dataset
    log_to_stderr("%(message)s")
    if os.path.isfile(name):
        return Path(name)
    datasets = require("datasets", "a dataset", "datastore")
    silent = None
    if not is_here(name):
        silent = ask_hub(name, "dataset", "README.md", repo_type="dataset")
        if silent is not None:
            constants.HF_HUB_OFFLINE = True
            datasets.config.HF_HUB_OFFLINE = True
    # One line on a terminal, and nothing in logs, in place of the libraries' progress bars.
    datasets.disable_progress_bars()
    disable_progress_bars()
    try:
        with Console(stderr=True).status(f"loading the dataset {escape(name)} …"):
            return datasets.load_dataset(
                name, name=args.config, split=args.split, streaming=args.streaming
            )
    except OSError as error:
        if silent is None:
            raise
        why = f"{name!r} is not a folder here, nor in the cache, and the Hub cannot be reached"
        raise OSError(f"{why}: {silent}") from error


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
