"""Builds a datastore: documents are tokenised, packed into shards, sorted, written and merged.

One shard is filled while the previous one is sorted and written; no more are in memory at once.
"""

from __future__ import annotations

import hashlib
import json
import math
from bisect import bisect
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from transformers import PreTrainedTokenizerBase

from ..corpus.documents import Source, open_source
from ..corpus.tokenise import vocabulary_size
from ..index.suffix_array import build_suffix_array
from ..kernels.compilation import usable_cores
from ..messages import check_count
from .datastore_config import LARGEST_SHARD, OWN_FILES, ShardEntry, StoreConfig
from .files import (
    Blocks,
    DatastoreError,
    FileEntry,
    blocks_of,
    only_writer,
    sweep,
    sync_folder,
    write_bytes,
)
from .shards import (
    grouped,
    map_tokens,
    merge_shards,
    split_documents,
    without_documents,
    write_shard,
)

SHARD_TOKENS = 32_000_000
# By its name the number of a document, counted over all shards, and a checksum of its tokens.
DocumentNames: TypeAlias = dict[str, tuple[int, str]]
# An addition waits for no merge of more tokens, or of more than 8 times those that it adds.
_MERGED = 1 << 21


@dataclass(frozen=True)
class BuildOptions:
    """Options by which documents become shards, see [`Datastore.build`]."""

    column: str | None = None
    pattern: str = "*"
    max_tokens: int | None = None
    shard_tokens: int = SHARD_TOKENS
    num_proc: int | None = None
    deduplicate: bool = False
    progress: bool = True

    def __post_init__(self) -> None:
        check_count("shard_tokens", self.shard_tokens, most=LARGEST_SHARD)


def build_store(
    folder: Path,
    documents: Any,
    tokenizer: PreTrainedTokenizerBase,
    options: BuildOptions,
    license: str | None,
    corpus_name: str | None,
) -> None:
    """Writes a datastore into an empty folder."""
    empty = StoreConfig.made_for(tokenizer, vocab_size=vocabulary_size(tokenizer))
    config, source = _with_documents(folder, empty, documents, tokenizer, options)
    about = source.about(corpus_name, license) | config.source
    content = tokenizer.backend_tokenizer.to_str().encode()
    tokenizer_file = write_bytes(folder / "tokenizer.json", content)
    config = replace(config, source=about, tokenizer_file=tokenizer_file)
    config.write(folder)
    sweep(folder, OWN_FILES, config.files())


def extend_store(
    folder: Path, documents: Any, tokenizer: PreTrainedTokenizerBase, options: BuildOptions
) -> None:
    """Writes what [`Datastore.add`] adds, replaces and merges into new files."""
    with _changing(folder) as old:
        old.check_tokenizer(folder, tokenizer)
        config, source = _with_documents(folder, old, documents, tokenizer, options)
        if config.shards == old.shards:
            return
        corpus = str(old.source.get("corpus") or "")
        if source.names is None and source.name not in corpus:
            config.source["corpus"] = f"{corpus}, {source.name}" if corpus else source.name
        config.write(folder)


def merge_store(folder: Path, progress: bool) -> None:
    """Merges all shards into as few as possible."""
    with _changing(folder) as config:
        groups = grouped(config.shards, growth=LARGEST_SHARD)
        shards = merge_shards(folder, config, groups, usable_cores(), progress)
        if shards != config.shards:
            replace(config, shards=shards).write(folder)


@contextmanager
def _changing(folder: Path) -> Iterator[StoreConfig]:
    """Locks a datastore, and deletes the files that its config.json does not name (any more)."""
    with only_writer(folder):
        config = StoreConfig.read(folder)
        if not config.shards:
            raise DatastoreError(
                f"{folder} has only the compact form; change the datastore that it was made from"
            )
        sweep(folder, OWN_FILES, config.files())
        try:
            yield config
        finally:
            sweep(folder, OWN_FILES, StoreConfig.read(folder).files())


def _with_documents(
    folder: Path,
    config: StoreConfig,
    documents: Any,
    tokenizer: PreTrainedTokenizerBase,
    options: BuildOptions,
) -> tuple[StoreConfig, Source]:
    """The config after documents are added; config.json does not name its new files yet."""
    source = open_source(documents, tokenizer, options.column, options.pattern)
    known = None
    if options.deduplicate and source.names is None:
        stored = (map_tokens(folder, config, shard) for shard in config.shards)
        known = {_digest(document) for document in split_documents(stored, config.separator)}
    old = read_names(folder, config.names_file)
    names = dict(old)
    threads = options.num_proc or usable_cores()
    with source.read_ids(tokenizer, config.token_dtype, threads, options.progress) as read:
        tokens = _new(read, known, options.max_tokens)
        if source.names is not None:
            tokens = _named(tokens, source.names, names, config.documents)
        new = _write_shards(folder, _packed(tokens, options.shard_tokens, config))
    if not new and (source.names is None or not config.shards):
        reason = "nothing that the datastore lacks" if config.shards else "no text with a token"
        raise ValueError(f"documents has {reason}")
    gone = sorted(number for name, (number, _) in old.items() if names.get(name) != old[name])
    shards = [*without_documents(folder, config, gone), *new]
    if not shards:
        raise ValueError(f"{folder} would have no document any more; delete the folder instead")
    groups = grouped(shards, largest=max(_MERGED, 8 * sum(shard.tokens for shard in new)))
    names = {
        name: (number - bisect(gone, number), digest) for name, (number, digest) in names.items()
    }
    shards = merge_shards(folder, config, groups, threads, options.progress)
    is_unique = not config.shards or config.source.get("deduplicated") is True
    about = config.source | {
        "deduplicated": options.deduplicate and is_unique,
        "documents": sum(shard.documents for shard in shards),
    }
    names_file = config.names_file if names == old else write_names(folder, names)
    return replace(config, source=about, shards=shards, names_file=names_file), source


def read_names(folder: Path, entry: FileEntry | None) -> DocumentNames:
    """Reads the names of documents; raises a DatastoreError if the file is damaged."""
    if entry is None:
        return {}
    content = b"".join(blocks_of(folder, entry))
    try:
        found = json.loads(content)
        return {
            name: (range(1 << 62)[number], str(digest)) for name, (number, digest) in found.items()
        }
    except (AttributeError, IndexError, RecursionError, TypeError, ValueError):
        raise DatastoreError(f"{folder / entry.name} is damaged: it has other values") from None


def write_names(folder: Path, names: DocumentNames) -> FileEntry | None:
    """Writes the names into a new file, if there are any."""
    if not names:
        return None
    content = json.dumps(names).encode()
    entry = write_bytes(folder / f"names-{hashlib.sha256(content).hexdigest()[:12]}.json", content)
    sync_folder(folder)
    return entry


def _new(
    documents: Iterable[np.ndarray], known: set[bytes] | None, max_tokens: int | None
) -> Iterator[np.ndarray]:
    """Yields documents (n,) whose digests are not in `known`, which grows.

    Their separators count among `max_tokens`."""
    left = math.inf if max_tokens is None else max_tokens
    for document in documents:
        if known is not None and len(document):
            digest = _digest(document)
            if digest in known:
                continue
            known.add(digest)
        yield document
        left -= len(document) + (len(document) > 0)
        if left <= 0:
            return


def _named(
    documents: Iterable[np.ndarray], labels: Iterable[str], names: DocumentNames, number: int
) -> Iterator[np.ndarray]:
    """Enters documents (n,) into `names`, the first with this number; yields the new ones."""
    for name, document in zip(labels, documents, strict=False):
        digest = _digest(document).hex()
        if len(document) == 0:
            names.pop(name, None)
        elif name not in names or names[name][1] != digest:
            names[name] = number, digest
            number += 1
            yield document


def _packed(
    documents: Iterable[np.ndarray], shard_tokens: int, config: StoreConfig
) -> Iterator[tuple[np.ndarray, int]]:
    """Yields the tokens (n,) of each shard, and the number of documents that end in it.

    A separator follows each document that is not empty."""
    separator = np.array([config.separator], config.token_dtype)
    shard = np.empty(shard_tokens, config.token_dtype)
    filled = ended = 0
    for document in documents:
        left = np.concatenate([document, separator]) if len(document) else document
        while len(left):
            part, left = np.split(left, [shard_tokens - filled])
            shard[filled : filled + len(part)] = part
            filled += len(part)
            ended += len(left) == 0
            if filled == shard_tokens:
                yield shard, ended
                shard = np.empty(shard_tokens, config.token_dtype)
                filled = ended = 0
    if filled:
        yield shard[:filled], ended


def _digest(document: np.ndarray) -> bytes:
    """A checksum of a document's tokens (n,)."""
    return hashlib.blake2b(document.tobytes(), digest_size=16).digest()


def _write_shards(folder: Path, packed: Iterable[tuple[np.ndarray, int]]) -> list[ShardEntry]:
    """Sorts and writes each shard, tokens (n,) and documents, while the next one is filled."""

    def write(tokens: np.ndarray, documents: int) -> ShardEntry:
        blocks = Blocks(tokens.dtype, len(tokens), [tokens])
        return write_shard(folder, documents, blocks, lambda _: [build_suffix_array(tokens)])

    with ThreadPoolExecutor(1) as background:
        writing: list[Future[ShardEntry]] = []
        for tokens, documents in packed:
            if writing:
                writing[-1].result()  # no more than two shards are in memory
            writing.append(background.submit(write, tokens, documents))
        written = [shard.result() for shard in writing]
    sync_folder(folder)
    return written
