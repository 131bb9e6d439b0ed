"""The commands that make datastores: `hf-refspec build`, `extend`, `compact` and `info`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from ..demo.default_model import load_tokenizer
from ..options import Option
from ..store.build.presets import PRESETS
from ..store.datastore import Datastore
from .source import Source


@dataclass(frozen=True, kw_only=True)
class _Building(Source):
    """What `build` and `extend` have in common."""

    preset: Annotated[Literal["python-stdlib"] | None, Option()] = None
    streaming: Annotated[bool, Option("do not download the dataset first")] = False
    tokenizer: Annotated[str, Option("a folder or a Hub id")]
    num_proc: Annotated[int | None, Option()] = None
    deduplicate: Annotated[bool, Option("drop repeated documents")] = False
    resume: Annotated[bool, Option("go on with a build that was killed")] = False
    engine: Annotated[Literal["local", "ray"], Option()] = "local"

    def _documents(self) -> tuple[Any, str | None, str | None]:
        """What is to be read, what that is called, and its licence."""
        given = [bool(self.source), self.dataset is not None, self.preset is not None]
        if sum(given) != 1:
            raise ValueError("give one of: files or folders, --dataset NAME, --preset NAME")
        if self.preset is not None:
            files, corpus, license = PRESETS[self.preset]
            return files(), corpus, license
        if self.dataset is not None:
            return self.load_dataset(self.streaming), None, None
        return self.source[0] if len(self.source) == 1 else self.source, None, None

    def _how(self) -> dict[str, Any]:
        """The keyword arguments of both `Datastore.build` and `Datastore.extend`."""
        names = ("column", "pattern", "num_proc", "deduplicate", "resume", "engine")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, kw_only=True)
class Build(_Building):
    """Builds and describes it."""

    out: Annotated[Path, Option("the new folder")]
    shard_tokens: Annotated[int, Option()] = 32_000_000
    license: Annotated[str | None, Option("of the corpus, for the card")] = None
    corpus: Annotated[str | None, Option("what the corpus is called, for the card")] = None

    def run(self) -> int:
        documents, corpus, license = self._documents()
        store = Datastore.build(
            documents,
            load_tokenizer(self.tokenizer),
            self.out,
            shard_tokens=self.shard_tokens,
            license=self.license or license,
            corpus=self.corpus or corpus,
            **self._how(),
        )
        _print_info(store)
        return 0


@dataclass(frozen=True, kw_only=True)
class _Store:
    """A datastore that there is."""

    store: Annotated[str, Option("its folder", positional=True)]


@dataclass(frozen=True, kw_only=True)
class Extend(
    _Building, _Store
):  # in this order its name comes before the files on the command line
    """Adds documents and describes the whole."""

    def run(self) -> int:
        documents, _, _ = self._documents()
        store = Datastore(self.store)
        _print_info(store.extend(documents, load_tokenizer(self.tokenizer), **self._how()))
        return 0


@dataclass(frozen=True, kw_only=True)
class Compact(_Store):
    """Makes the compact form and describes it."""

    out: Annotated[Path | None, Option("a new folder; else it is added to the store")] = None
    max_ngram: Annotated[int, Option()] = 3
    ngrams_per_order: Annotated[int | None, Option()] = None
    max_bytes: Annotated[int | None, Option()] = None

    def run(self) -> int:
        store = Datastore(self.store).compact(
            self.out,
            max_ngram=self.max_ngram,
            ngrams_per_order=self.ngrams_per_order,
            max_bytes=self.max_bytes,
        )
        _print_info(store)
        return 0


@dataclass(frozen=True, kw_only=True)
class Info:
    """Describes it."""

    store: Annotated[str, Option("a folder or a Hub id", positional=True)]
    verify: Annotated[bool, Option("read all files, check the checksums")] = False

    def run(self) -> int:
        store = Datastore.from_pretrained(self.store)
        _print_info(store)
        if self.verify:
            store.verify()
            print("all files are as they were written")
        return 0


def _print_info(store: Datastore) -> None:
    config, about = store.config, store.config.source
    print(store.path)
    print(f"  corpus      {about.get('corpus') or 'not stated'}")
    print(f"  licence     {about.get('license') or 'not stated'}")
    print(f"  tokenizer   {config.tokenizer}, fingerprint {config.fingerprint}")
    print(f"  vocabulary  {config.vocab_size:,}")
    if config.shards:
        size = sum(shard.tokens_file.size + shard.suffixes_file.size for shard in config.shards)
        print(
            f"  full        {store.tokens:,} tokens, {store.documents:,} documents, "
            f"{len(config.shards)} shards, {_megabytes(size)}, {size / store.tokens:.2f} bytes a "
            "token"
        )
    if config.ngrams:
        orders = ", ".join(f"{n:,}" for n in config.ngrams.ngrams)
        print(
            f"  compact     {sum(config.ngrams.ngrams):,} n-grams ({orders} of the orders 1, 2, "
            f"...), {config.ngrams.nodes:,} nodes, {_megabytes(config.ngrams.file.size)}, of "
            f"{config.ngrams.corpus_tokens:,} tokens"
        )


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
