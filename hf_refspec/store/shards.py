"""The full form of a datastore: shards of tokens with suffix arrays, memory-mapped and merged.

As in a log-structured store, each new shard joins the preceding ones that are not much larger than
all that came after them ([`grouped`]). Sizes grow geometrically: the number of shards that a draft
searches, and of times that a token is rewritten, grows with the logarithm of the corpus.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from tqdm.auto import tqdm

from ..index.suffix_array import merge_suffixes
from .datastore_config import LARGEST_SHARD, ShardEntry, StoreConfig
from .files import (
    Blocks,
    DatastoreError,
    FileEntry,
    check_file,
    read_arrays,
    sync_folder,
    write_arrays,
)

# Tokens that are searched for the ends of documents, or copied, at a time.
_BLOCK = 1 << 20
# A shard is joined with the newer ones unless it is more than 4 times as large as all of them: a
# larger factor leaves fewer shards to search, and writes each token more often.
GROWTH = 4


def write_shard(
    folder: Path,
    documents: int,
    tokens: Blocks,
    suffixes: Callable[[FileEntry], Iterable[np.ndarray]],
) -> ShardEntry:
    """Writes a shard in new files; `suffixes` returns its suffix array for the file of its tokens.

    Raises a DatastoreError if there is not one suffix for each token."""
    # A number above all others: a reader may be about to open an old file.
    numbers = (re.fullmatch(r"tokens-(\d+)\.safetensors", name) for name in os.listdir(folder))
    number = max((int(number[1]) for number in numbers if number), default=0) + 1
    tokens_file = write_arrays(folder / f"tokens-{number:05d}.safetensors", {"tokens": tokens})
    path = folder / f"suffixes-{number:05d}.safetensors"
    try:
        blocks = Blocks(np.dtype(np.int32), tokens.length, suffixes(tokens_file))
        suffixes_file = write_arrays(path, {"suffixes": blocks})
    except ValueError as error:
        raise DatastoreError(f"{folder} cannot be changed: {error}") from None
    return ShardEntry(tokens.length, documents, tokens_file, suffixes_file)


def map_tokens(folder: Path, config: StoreConfig, shard: ShardEntry) -> np.ndarray:
    """The tokens of a shard, uint16 or uint32 of shape `(n,)`; raises as [`read_arrays`]."""
    expected = {"tokens": (config.token_dtype, shard.tokens)}
    return read_arrays(folder, shard.tokens_file, expected)["tokens"]


def map_suffixes(folder: Path, shard: ShardEntry) -> np.ndarray:
    """The suffix array of a shard, int32 of shape `(n,)`; raises as [`read_arrays`]."""
    expected = {"suffixes": (np.int32, shard.tokens)}
    return read_arrays(folder, shard.suffixes_file, expected)["suffixes"]


def split_documents(texts: Iterable[np.ndarray], separator: int) -> Iterator[np.ndarray]:
    """Yields the documents (d,) of texts (n,) without separators; one can continue in the next."""
    begun: list[np.ndarray] = []
    for text in texts:
        for begin in range(0, len(text), _BLOCK):
            tokens = text[begin : begin + _BLOCK]
            start = 0
            for end in np.flatnonzero(tokens == separator):
                yield np.concatenate([*begun, tokens[start:end]])
                begun = []
                start = int(end) + 1
            begun.append(tokens[start:])


def grouped(
    shards: Sequence[ShardEntry], growth: int = GROWTH, largest: int = LARGEST_SHARD
) -> list[list[ShardEntry]]:
    """Groups shards that are to be merged into one of at most `largest` tokens, or stay alone."""
    groups: list[list[ShardEntry]] = []
    for shard in reversed(shards):
        newer = _token_count(groups[-1]) if groups else 0
        if shard.tokens <= min(growth * newer, largest - newer):
            groups[-1].insert(0, shard)
        else:
            groups.append([shard])
    return groups[::-1]


def _token_count(shards: Iterable[ShardEntry]) -> int:
    return sum(shard.tokens for shard in shards)


def merge_shards(
    folder: Path, config: StoreConfig, groups: list[list[ShardEntry]], threads: int, show: bool
) -> list[ShardEntry]:
    """Merges each group into one shard, in new files; returns all shards after that."""
    total = sum(_token_count(group) for group in groups if len(group) > 1)
    options = {"unit_scale": True, "disable": not show or None, "delay": 1}
    with tqdm(desc="merging", total=total, unit=" tokens", **options) as bar:
        shards = [
            _merge(folder, config, group, threads, bar) if len(group) > 1 else group[0]
            for group in groups
        ]
    sync_folder(folder)
    return shards


def without_documents(
    folder: Path, config: StoreConfig, numbers: Sequence[int]
) -> list[ShardEntry]:
    """Writes shards again without the documents of these numbers, counted over all shards.

    Returns all shards after that. The old files stay, and nothing names the new ones yet."""
    gone = np.sort(np.array(numbers, np.int64))
    first = 0
    shards = []
    for shard in config.shards:
        inside = (gone >= first) & (gone <= first + shard.documents)
        left = _cut(folder, config, shard, gone[inside] - first) if inside.any() else shard
        if left is not None:
            shards.append(left)
        first += shard.documents
    return shards


def _cut(
    folder: Path, config: StoreConfig, shard: ShardEntry, pieces: np.ndarray
) -> ShardEntry | None:
    """Writes a shard without some of its documents, whose numbers are `pieces` (p,).

    The first and the last one may be parts of documents. The suffixes keep their order, which is
    right as far as a document reaches."""
    tokens = map_tokens(folder, config, shard)
    suffixes = map_suffixes(folder, shard)
    whole_ends = np.flatnonzero(tokens == config.separator) + 1
    bounds = np.unique(np.r_[0, whole_ends, len(tokens)]).astype(np.int32)
    pieces = pieces[pieces < len(bounds) - 1]
    if len(pieces) in (0, len(bounds) - 1):
        return None if len(pieces) else shard
    for file in (shard.tokens_file, shard.suffixes_file):
        check_file(folder, file)
    starts = bounds[pieces]
    ends = bounds[pieces + 1]
    # By the number of starts before a suffix: the last end, and how much is cut out.
    last_ends = np.r_[np.int32(0), ends]
    shifts = np.r_[0, np.cumsum(ends - starts)]

    def kept() -> Iterator[np.ndarray]:
        for i in range(0, len(suffixes), _BLOCK):
            block = suffixes[i : i + _BLOCK]
            cuts = np.searchsorted(starts, block, side="right")
            outside = block >= last_ends[cuts]
            yield block[outside] - shifts[cuts[outside]]

    size = len(tokens) - int(shifts[-1])
    texts = (tokens[begin:end] for begin, end in zip(last_ends, [*starts, None], strict=True))
    documents = shard.documents - int((pieces < len(whole_ends)).sum())
    return write_shard(folder, documents, Blocks(tokens.dtype, size, texts), lambda _: kept())


def _merge(
    folder: Path, config: StoreConfig, shards: list[ShardEntry], threads: int, bar: tqdm
) -> ShardEntry:
    for shard in shards:  # damaged content must not get a valid checksum
        check_file(folder, shard.tokens_file)
        check_file(folder, shard.suffixes_file)
    size = _token_count(shards)
    texts = (map_tokens(folder, config, shard) for shard in shards)
    blocks = (text[i : i + _BLOCK] for text in texts for i in range(0, len(text), _BLOCK))
    parts = [(shard.tokens, partial(map_suffixes, folder, shard)) for shard in shards]

    def merged(tokens_file: FileEntry) -> Iterator[np.ndarray]:
        expected = {"tokens": (config.token_dtype, size)}
        tokens = read_arrays(folder, tokens_file, expected)["tokens"]
        for block in merge_suffixes(tokens, parts, threads):
            bar.update(len(block))
            yield block

    documents = sum(shard.documents for shard in shards)
    return write_shard(folder, documents, Blocks(config.token_dtype, size, blocks), merged)
