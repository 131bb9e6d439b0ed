"""Packs documents into shards, which are sorted and written in the background.

One shard is filled while the previous one is sorted and written; no more are in memory at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..datastore_config import ShardEntry
from ..files import DatastoreError
from ..folder import sync_folder
from ..shards import next_number, write_part
from .engine import in_order
from .progress import BuildProgress
from .tokenizing import TokenBatch


class Packed(NamedTuple):
    """A shard in memory: its tokens, the documents that end in it, and how far the source is read
    then (whole documents, and entries of the next one)."""

    tokens: np.ndarray
    documents: int
    done: tuple[int, int]


def write_shards(
    folder: Path,
    packed: Iterable[Packed],
    sort: Callable[[np.ndarray], np.ndarray],
    progress: BuildProgress,
) -> None:
    """Writes shards, and the progress after each; `sort` returns a suffix array."""
    first = next_number(folder) - len(progress.shards)

    def write(shard: Packed) -> None:
        number = first + len(progress.shards)
        arrays = {"tokens": shard.tokens, "suffixes": sort(shard.tokens)}
        files = [write_part(folder, name, number, arrays[name]) for name in arrays]
        progress.shards.append(ShardEntry(len(shard.tokens), shard.documents, *files))
        progress.documents, progress.entries = shard.done
        sync_folder(folder)
        progress.write(folder)

    with ThreadPoolExecutor(1) as background:
        begun = in_order(packed, lambda shard: background.submit(write, shard), 1, Future.cancel)
        with closing(begun) as writing:
            for each in writing:
                each.result()


def packed_documents(
    token_batches: Iterator[TokenBatch],
    shard_tokens: int,
    dtype: np.dtype,
    done: tuple[int, int],
    digests: set[bytes] | None,
    advance: Callable[[int], object],
) -> Iterator[Packed]:
    """Packs documents, except those whose digest is known already.

    Args:
        token_batches, shard_tokens, dtype: The documents, and the entries of a shard.
        done: How far an earlier build has read the source.
        digests (`set`, *optional*): Of the known documents; new ones are added.
        advance: Called with the number of documents of each batch.
    """
    number, skip = done
    others = DatastoreError("source has other documents than before; start again without resume")
    shard, filled, ended = np.empty(shard_tokens, dtype), 0, 0
    for lengths, tokens in token_batches:
        for document in np.split(tokens, np.cumsum(lengths)[:-1]):
            number += 1
            if skip >= max(len(document), 1):
                raise others
            if digests is not None and len(document):
                digest = document_digest(document[:-1])
                if digest in digests and not skip:
                    continue
                digests.add(digest)
            start, skip = skip, 0
            while start < len(document):
                part = document[start : start + shard_tokens - filled]
                shard[filled : filled + len(part)] = part
                filled, start = filled + len(part), start + len(part)
                whole = start == len(document)
                ended += whole
                done = (number, 0) if whole else (number - 1, start)
                if filled == shard_tokens:
                    yield Packed(shard, ended, done)
                    shard, filled, ended = np.empty(shard_tokens, dtype), 0, 0
        advance(len(lengths))
    if skip:
        raise others
    if filled:
        yield Packed(shard[:filled], ended, done)


def first_tokens(token_batches: Iterator[TokenBatch], most: int) -> Iterator[TokenBatch]:
    """Ends after the document that reaches `most` tokens, its separator included."""
    for lengths, tokens in token_batches:
        if most <= 0:
            return
        ends = np.cumsum(lengths)
        number = int(np.searchsorted(ends, most)) + 1
        yield lengths[:number], tokens[: ends[:number][-1]]
        most -= len(tokens)


def document_digest(document: np.ndarray) -> bytes:
    """A checksum of a document's tokens."""
    return hashlib.blake2b(document.tobytes(), digest_size=16).digest()
