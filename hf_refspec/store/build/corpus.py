"""Builds a datastore: documents are tokenised, packed into shards, sorted, written and merged.

One shard is filled while the previous one is sorted and written; no more are in memory at once.
"""

from __future__ import annotations

import hashlib
import math
import os
from bisect import bisect
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from ...check_count import check_count
from ...version import __version__
from ..datastore_config import LARGEST_SHARD, OWN_FILES, ShardEntry, StoreConfig
from ..document_names import DocumentNames, read_names, write_names
from ..files import DatastoreError, write_bytes
from ..folder import new_folder, only_writer, sweep, sync_folder
from ..shards import (
    grouped,
    map_tokens,
    merge_shards,
    next_number,
    split_documents,
    without_documents,
    write_part,
)
from ..stored_tokenizer import public_name, vocabulary_size
from .engine import Engine, TokenBatch, open_engine, usable_cores
from .source import Source, open_source

# An addition waits for no merge of more tokens, or of more than 8 times those that it adds.
_MERGED = 1 << 21


@dataclass(frozen=True)
class BuildOptions:
    """How documents are made into shards.

    Args:
        column (`str`, *optional*): Of a dataset or of files of rows. By default that of the chats,
            `"text"`, `"content"`, or `"prompt"` with `"completion"`.
        pattern (`str`, *optional*, defaults to `"*"`): Which files below a folder, as `"*.py"`.
        max_tokens (`int`, *optional*): Stop after the document that reaches this number of tokens.
        shard_tokens (`int`, *optional*, defaults to 32,000,000): Entries of a shard, each of which
            takes about 12 bytes of memory.
        num_proc (`int`, *optional*): Threads (or Ray tasks) that tokenise. By default one for each
            usable core.
        deduplicate (`bool`, *optional*, defaults to `False`): Drop exact repetitions of documents,
            and documents that are in the datastore already.
        engine (`str`, *optional*, defaults to `"local"`): `"local"`, or `"ray"` to tokenise and
            sort on a Ray cluster.
        progress (`bool`, *optional*, defaults to `True`): Show the progress on a terminal or in a
            notebook.

    Raises:
        ValueError: If a number is out of its bounds.
    """

    column: str | None = None
    pattern: str = "*"
    max_tokens: int | None = None
    shard_tokens: int = 32_000_000
    num_proc: int | None = None
    deduplicate: bool = False
    engine: str = "local"
    progress: bool = True

    def __post_init__(self) -> None:
        count = self.shard_tokens
        if not isinstance(count, int) or not 1 <= count <= LARGEST_SHARD:
            raise ValueError(f"shard_tokens must be from 1 to {LARGEST_SHARD}, but is {count!r}")
        if self.max_tokens is not None:
            check_count("max_tokens", self.max_tokens, " or None")
        if self.num_proc is not None:
            check_count("num_proc", self.num_proc, " or None")


def build_store(
    documents: Any,
    tokenizer: PreTrainedTokenizerBase,
    path: str | os.PathLike,
    *,
    license: str | None = None,
    corpus_name: str | None = None,
    **options: Any,
) -> Path:
    """Builds a datastore in a new folder.

    Until it is complete it is `.<name>.hf_refspec-build` beside its path. A build that fails
    deletes that; a build that is killed leaves it to the next one at this path, which deletes it.

    Args:
        documents: A `datasets` dataset (map-style or streaming) with a column of texts or chats; a
            file of texts or rows (.jsonl, .json, .csv, .parquet, each with .gz too), a folder, or a
            list of both; an iterable of texts or of lists of ids; or a dict of these by their
            names, see [`Datastore.add`].
        tokenizer (`PreTrainedTokenizerBase`): The target model's, a fast one.
        path (`str` or `os.PathLike`): The folder to make.
        license (`str`, *optional*): Of the corpus. By default the dataset's.
        corpus_name (`str`, *optional*): Its name. By default the dataset's or the folder's.
        options: See [`BuildOptions`].

    Returns:
        `Path`: The folder.

    Raises:
        FileExistsError: If there is something at `path`.
        ValueError: If the documents have no tokens, or one of them is no document.
        DatastoreError: If another process is building it.
        OSError: If it cannot be written.
    """
    chosen = BuildOptions(**options)
    config = StoreConfig.made_for(tokenizer, vocab_size=vocabulary_size(tokenizer))
    opened = open_source(documents, tokenizer, config.vocab_size, chosen.column, chosen.pattern)
    engines = open_engine(chosen.engine, chosen.num_proc, config, tokenizer)
    with new_folder(Path(path)) as folder, engines as engine:
        shards, names = _add_shards(folder, config, opened, engine, chosen)
        about = {
            "corpus": corpus_name or opened.name,
            "license": license or opened.license,
            "deduplicated": chosen.deduplicate,
            "hf_refspec": __version__,
            "documents": sum(shard.documents for shard in shards),
        }
        content = tokenizer.backend_tokenizer.to_str().encode()
        tokenizer_file = write_bytes(folder / "tokenizer.json", content)
        config = replace(config, source=about, shards=shards, tokenizer_file=tokenizer_file)
        config = replace(config, names_file=write_names(folder, names))
        config.write(folder)
        sweep(folder, OWN_FILES, config.files())
    return Path(path)


def extend_store(
    folder: Path, documents: Any, tokenizer: PreTrainedTokenizerBase, **options: Any
) -> None:
    """Adds documents to a datastore in new shards, which are merged with older ones of about their
    size, and cuts out the documents that they replace, all in new files; see [`Datastore.add`]."""
    chosen = BuildOptions(**options)
    with changing(folder, "; extend the datastore that it was made from") as config:
        remedy = f"it cannot be extended with {public_name(tokenizer)}"
        config.check_tokenizer(folder, tokenizer, remedy)
        opened = open_source(documents, tokenizer, config.vocab_size, chosen.column, chosen.pattern)
        with open_engine(chosen.engine, chosen.num_proc, config, tokenizer) as engine:
            shards, names = _add_shards(folder, config, opened, engine, chosen)
        if shards == config.shards:
            return
        about = dict(config.source)
        if opened.names is None and opened.name not in str(about.get("corpus", "")):
            named = (about.get("corpus"), opened.name)
            about["corpus"] = ", ".join(str(name) for name in named if name)
        about["deduplicated"] = bool(about.get("deduplicated")) and chosen.deduplicate
        about["documents"] = sum(shard.documents for shard in shards)
        config = replace(config, source=about, shards=shards)
        replace(config, names_file=write_names(folder, names)).write(folder)


@contextmanager
def changing(folder: Path, remedy: str) -> Iterator[StoreConfig]:
    """Locks a datastore, and deletes the files that its config.json does not name (any more)."""
    with only_writer(folder):
        config = StoreConfig.read(folder)
        if not config.shards:
            raise DatastoreError(f"{folder} has only the compact form{remedy}")
        sweep(folder, OWN_FILES, config.files())
        try:
            yield config
        finally:
            sweep(folder, OWN_FILES, StoreConfig.read(folder).files())


def _add_shards(
    folder: Path, config: StoreConfig, source: Source, engine: Engine, options: BuildOptions
) -> tuple[list[ShardEntry], DocumentNames]:
    """Writes a source's documents into new shards, cuts out those that they replace, and merges
    shards that are due; returns all shards and names. The config.json does not name these yet."""
    known = None
    if options.deduplicate and source.names is None:
        stored = (map_tokens(folder, config, shard) for shard in config.shards)
        known = set(map(_digest, split_documents(stored, config.separator)))
    old, first = read_names(folder, config.names_file), sum(s.documents for s in config.shards)
    names, hidden = {**old}, not options.progress or None
    with tqdm(desc="tokenizing", total=source.total, unit=" documents", disable=hidden) as bar:
        documents = _documents(engine.tokenize(source.documents), known, options.max_tokens, bar)
        if source.names is not None:
            documents = _named(documents, source.names, names, first)
        packed = _packed(documents, options.shard_tokens, config.token_dtype)
        new = _write_shards(folder, packed, engine.sort)
    if not new and (source.names is None or not config.shards):
        kind = "that the datastore does not have" if config.shards else "with a token"
        raise ValueError(f"documents has none {kind}")
    gone = sorted(number for name, (number, _) in old.items() if names.get(name) != old[name])
    shards = [*without_documents(folder, config, gone), *new]
    if not shards:
        raise ValueError(f"{folder} would have no document any more; delete the folder instead")
    most = max(_MERGED, 8 * sum(shard.tokens for shard in new))
    groups, threads = grouped(shards, largest=most), options.num_proc or usable_cores()
    moved = {name: (at - bisect(gone, at), digest) for name, (at, digest) in names.items()}
    return merge_shards(folder, config, groups, threads, options.progress), moved


def _named(
    documents: Iterable[np.ndarray], given: Iterable[str], names: DocumentNames, number: int
) -> Iterator[np.ndarray]:
    """Gives documents, the first with this number, their names; yields those that are new."""
    for name, document in zip(given, documents, strict=False):
        digest = _digest(document[:-1]).hex()
        if len(document) == 0:
            names.pop(name, None)
        elif name not in names or names[name][1] != digest:
            names[name] = number, digest
            number += 1
            yield document


def _documents(
    token_batches: Iterable[TokenBatch], known: set[bytes] | None, most: int | None, bar: tqdm
) -> Iterator[np.ndarray]:
    """Yields the tokens of each document, with its separator, up to the one that reaches `most`
    tokens. A document is left out if its digest is in `known`, to which new ones are added."""
    left = math.inf if most is None else most
    for lengths, tokens in token_batches:
        for document in np.split(tokens, np.cumsum(lengths)[:-1]):
            if known is not None and len(document):
                digest = _digest(document[:-1])
                if digest in known:
                    continue
                known.add(digest)
            yield document
            left -= len(document)
            if left <= 0:
                return
        bar.update(len(lengths))


def _packed(
    documents: Iterable[np.ndarray], shard_tokens: int, dtype: np.dtype
) -> Iterator[tuple[np.ndarray, int]]:
    """Packs documents into shards of `shard_tokens` entries, and yields each with the number of
    documents that end in it."""
    shard, filled, ended = np.empty(shard_tokens, dtype), 0, 0
    for document in documents:
        start = 0
        while start < len(document):
            part = document[start : start + shard_tokens - filled]
            shard[filled : filled + len(part)] = part
            filled, start = filled + len(part), start + len(part)
            ended += start == len(document)
            if filled == shard_tokens:
                yield shard, ended
                shard, filled, ended = np.empty(shard_tokens, dtype), 0, 0
    if filled:
        yield shard[:filled], ended


def _digest(document: np.ndarray) -> bytes:
    """A checksum of a document's tokens."""
    return hashlib.blake2b(document.tobytes(), digest_size=16).digest()


def _write_shards(
    folder: Path,
    packed: Iterable[tuple[np.ndarray, int]],
    sort: Callable[[np.ndarray], np.ndarray],
) -> list[ShardEntry]:
    """Writes each shard while the next one is filled; `sort` returns a suffix array."""
    numbers = count(next_number(folder))

    def write(shard: tuple[np.ndarray, int]) -> ShardEntry:
        number, (tokens, documents) = next(numbers), shard
        tokens_file = write_part(folder, "tokens", number, tokens)
        suffixes_file = write_part(folder, "suffixes", number, sort(tokens))
        return ShardEntry(len(tokens), documents, tokens_file, suffixes_file)

    with ThreadPoolExecutor(1) as background:
        writing: list[Future[ShardEntry]] = []
        for shard in packed:
            if writing:
                writing[-1].result()  # no more than two shards are in memory
            writing.append(background.submit(write, shard))
        written = [each.result() for each in writing]
    sync_folder(folder)
    return written
