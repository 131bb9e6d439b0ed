"""`hf-refspec store`: the commands that write, describe or publish datastores."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from ...corpus.untrusted import printable
from ...messages import counted
from ...retrieval.knowledge_base import KnowledgeBaseConfig
from ...store import hub
from ...store.datastore import Datastore
from ...store.datastore_config import COLUMNS, StoreConfig
from ...store.files import DatastoreError
from ...store.hub import card as card_of
from ...store.names import check_repo_id, named_tokenizer, with_owner
from ...store.recycling_table import RecyclingTableConfig
from ...store.stored_folder import FolderConfig
from .arguments import WRITTEN_TO, add_source, load_corpus, positive, show_written


def add_build(parser: ArgumentParser) -> None:
    add = parser.add_argument
    _add_corpus(parser)
    add("--tokenizer", help="a folder or a Hub id; SmolLM2-135M-Instruct's by default")
    add("--out", type=Path, required=True, help="the new folder")
    add("--shard-tokens", type=positive, default=32_000_000, metavar="N", help="of a shard")
    _add_about(parser)


def _add_about(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--name", help="of the corpus, for the card; by default its own")
    add("--license", help="its licence, for the card; by default what the corpus states")
    add("--description", metavar="TEXT", help="of the corpus, for the card")


def build(args: Namespace) -> None:
    documents, about = load_corpus(args, args.streaming)
    if args.tokenizer is None:
        from ...smollm2 import default_model  # loads torch

        args.tokenizer = default_model()
    options = {**about, **_options(args), "shard_tokens": args.shard_tokens}
    store = Datastore.build(documents, named_tokenizer(args.tokenizer), args.out, **options)
    if args.description is not None:
        StoreConfig.describe(args.out, description=args.description)
        store.refresh()
    _print_info(store)


def add_extend(parser: ArgumentParser) -> None:
    parser.add_argument("store", help="the folder of the datastore")
    _add_corpus(parser)


def extend(args: Namespace) -> None:
    store = Datastore(args.store)
    tokenizer = store.load_tokenizer()
    documents, _ = load_corpus(args, args.streaming)
    store.add(documents, tokenizer, **_options(args))
    _print_info(store)


def add_merge(parser: ArgumentParser) -> None:
    parser.add_argument("store", help="the folder of the datastore")


def merge(args: Namespace) -> None:
    _print_info(Datastore(args.store).merge())


def add_retokenize(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("store", help="a folder or a Hub id, of a datastore with its full form")
    add("--tokenizer", required=True, help="the other model's, a folder or a Hub id")
    add("--out", type=Path, required=True, help="the new folder")


def retokenize(args: Namespace) -> None:
    store = Datastore.from_pretrained(args.store, form="full")
    _print_info(store.retokenize(named_tokenizer(args.tokenizer), args.out))


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
    add = parser.add_argument
    add("store", help="the folder of a datastore, recycling table, knowledge base or kNN datastore")
    add("repo", help='the name of the dataset repo on the Hub, "user/name"')
    place = parser.add_mutually_exclusive_group()
    help = "make a new repository private"
    place.add_argument("--private", action="store_true", default=None, help=help)
    place.add_argument("--out", type=Path, metavar="FOLDER", help=WRITTEN_TO)


def push(args: Namespace) -> None:
    folder = Path(args.store)
    kind = _kind_of(folder)
    if args.out is None:
        print(hub.push(folder, kind, args.repo, private=args.private).repo_url)
    else:
        hub.write_repository(folder, kind, args.repo, args.out)
        show_written(args.out, args.repo, "dataset")


def _kind_of(folder: Path) -> type[FolderConfig]:
    """The config of a stored folder; a datastore's for any other, whose errors are the clearest."""
    from ...ralm.knn_datastore import KnnConfig  # loads torch

    for kind in (KnowledgeBaseConfig, RecyclingTableConfig, KnnConfig):
        with suppress(DatastoreError):
            kind.read(folder)
            return kind
    return StoreConfig


def add_info(parser: ArgumentParser) -> None:
    help = "a folder or a Hub id of a datastore, or the folder of a knowledge base"
    parser.add_argument("store", help=help)
    parser.add_argument("--verify", action="store_true", help="check the checksums of all files")


def info(args: Namespace) -> None:
    path = Path(args.store)
    try:
        base = KnowledgeBaseConfig.read(path)
    except DatastoreError:
        store = Datastore.from_pretrained(args.store)
        _print_info(store)
        verify = store.verify
    else:
        _print_origin(path, base)
        kind = f"embeddings of {base.dimension} numbers" if base.dimension else "for BM25"
        print(f"  passages    {base.passages:,}, {counted(base.tokens, 'token')}, {kind}")
        verify = partial(base.check_files, path)
    if args.verify:
        verify()
        print("all files are as they were written")


def add_card(parser: ArgumentParser) -> None:
    parser.add_argument("store", type=Path, help="a folder that can be pushed, of any kind")
    parser.add_argument("repo", help='the name of the repository on the Hub, "user/name"')
    parser.epilog = "--name, --license and --description change the folder."
    _add_about(parser)


def card(args: Namespace) -> None:
    check_repo_id(args.repo)
    about = {"corpus": args.name, "license": args.license, "description": args.description}
    kind = _kind_of(args.store)
    if any(about.values()):
        kind.describe(args.store, **about)
    print(card_of(kind.read(args.store), with_owner(args.repo)))


def _add_corpus(parser: ArgumentParser) -> None:
    """Adds the arguments that `build` and `extend` share."""
    add_source(parser)
    add = parser.add_argument
    add("--streaming", action="store_true", help="do not download the dataset first")
    add("--max-tokens", type=positive, metavar="N", help="stop after N tokens")
    add("--deduplicate", action="store_true", help="drop repeated documents")
    help = "builds in processes of this machine, or on a Ray cluster"
    add("--engine", choices=("local", "ray"), default="local", help=help)


def _options(args: Namespace) -> dict[str, Any]:
    names = ("column", "pattern", "max_tokens", "deduplicate", "engine")
    return {name: getattr(args, name) for name in names}


def _print_origin(path: Path, config: Any) -> None:
    print(path)
    for label, name in (("corpus", "corpus"), ("licence", "license"), ("about", "description")):
        print(f"  {label:11} {printable(config.source.get(name) or 'not stated')}")
    fingerprint = printable(config.fingerprint)
    print(f"  tokenizer   {printable(config.tokenizer)}, fingerprint {fingerprint}")
    print(f"  vocabulary  {config.vocab_size:,}")


def _print_info(store: Datastore) -> None:
    _print_origin(store.path, store.config)
    texts = store.config.card_texts()
    for name in ("documents", "full_form", "compact_form"):
        if texts[name] != "none":
            print(f"  {name.removesuffix('_form'):11} {texts[name]}")
    for row in store.config.measured:
        entries = [f"{name} {row[name]}" for name in COLUMNS if name in row]
        print("  measured   ", printable(", ".join(entries)))
