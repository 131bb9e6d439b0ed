"""Packs documents into shards, which are sorted and written in the background.

One shard is filled while the previous one is sorted and written; no more are in memory at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..datastore_config import ShardEntry
from ..folder import sync_folder
from ..shards import next_number, write_part
from .engine import in_order
from .tokenizing import TokenBatch


class Packed(NamedTuple):
    """A shard in memory: its tokens, and the number of documents that end in it."""

    tokens: np.ndarray
    documents: int


def write_shards(
    folder: Path, packed: Iterable[Packed], sort: Callable[[np.ndarray], np.ndarray]
) -> list[ShardEntry]:
    """Writes shards and returns their names; `sort` returns a suffix array."""
    numbers = count(next_number(folder))

    def write(shard: Packed) -> ShardEntry:
        number = next(numbers)
        arrays = {"tokens": shard.tokens, "suffixes": sort(shard.tokens)}
        files = [write_part(folder, name, number, arrays[name]) for name in arrays]
        return ShardEntry(len(shard.tokens), shard.documents, *files)

    with ThreadPoolExecutor(1) as background:
        begun = in_order(packed, lambda shard: background.submit(write, shard), 1, Future.cancel)
        with closing(begun) as writing:
            written = [each.result() for each in writing]
    sync_folder(folder)
    return written


def packed_documents(
    token_batches: Iterator[TokenBatch],
    shard_tokens: int,
    dtype: np.dtype,
    digests: set[bytes] | None,
    advance: Callable[[int], object],
) -> Iterator[Packed]:
    """Packs documents, except those whose digest is known already.

    Args:
        token_batches, shard_tokens, dtype: The documents, and the entries of a shard.
        digests (`set`, *optional*): Of the known documents; new ones are added.
        advance: Called with the number of documents of each batch.
    """
    shard, filled, ended = np.empty(shard_tokens, dtype), 0, 0
    for lengths, tokens in token_batches:
        for document in np.split(tokens, np.cumsum(lengths)[:-1]):
            if digests is not None and len(document):
                digest = document_digest(document[:-1])
                if digest in digests:
                    continue
                digests.add(digest)
            start = 0
            while start < len(document):
                part = document[start : start + shard_tokens - filled]
                shard[filled : filled + len(part)] = part
                filled, start = filled + len(part), start + len(part)
                ended += start == len(document)
                if filled == shard_tokens:
                    yield Packed(shard, ended)
                    shard, filled, ended = np.empty(shard_tokens, dtype), 0, 0
        advance(len(lengths))
    if filled:
        yield Packed(shard[:filled], ended)


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
