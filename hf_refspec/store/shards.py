"""The full form of a datastore: shards of tokens with suffix arrays, memory-mapped."""

from __future__ import annotations

import os
import re
from collections.abc import Generator, Iterable
from pathlib import Path

import numpy as np

from ..index.suffix_array import IndexedText
from .datastore_config import ShardEntry, StoreConfig
from .files import Blocks, FileEntry, read_arrays, write_arrays

# Tokens that are searched for the ends of documents at a time.
_BLOCK = 1 << 20


def next_number(folder: Path) -> int:
    """The number of a new shard: one that no file in the folder has, for a reader may be about to
    open it."""
    numbers = (re.fullmatch(r"tokens-(\d+)\.safetensors", name) for name in os.listdir(folder))
    return max((int(number[1]) for number in numbers if number), default=0) + 1


def write_part(folder: Path, name: str, number: int, array: np.ndarray | Blocks) -> FileEntry:
    """Writes the "tokens" or the "suffixes" of a shard; raises as [`write_arrays`]."""
    return write_arrays(folder / f"{name}-{number:05d}.safetensors", {name: array})


def map_tokens(folder: Path, config: StoreConfig, shard: ShardEntry) -> np.ndarray:
    """The tokens of a shard, uint16 or uint32 of shape `(n,)`; raises as [`read_arrays`]."""
    expected = {"tokens": (config.token_dtype, shard.tokens)}
    return read_arrays(folder, shard.tokens_file, expected)["tokens"]


def map_suffixes(folder: Path, shard: ShardEntry) -> np.ndarray:
    """The suffix array of a shard, int32 of shape `(n,)`; raises as [`read_arrays`]."""
    return read_arrays(folder, shard.suffixes_file, {"suffixes": (np.int32, shard.tokens)})[
        "suffixes"
    ]


def map_shard(folder: Path, config: StoreConfig, shard: ShardEntry) -> IndexedText:
    """The tokens of a shard with their suffix array; raises as [`read_arrays`]."""
    tokens, suffixes = map_tokens(folder, config, shard), map_suffixes(folder, shard)
    return IndexedText(tokens, suffixes, config.vocab_size)


def split_documents(
    texts: Iterable[np.ndarray], separator: int, block: int = _BLOCK
) -> Generator[np.ndarray, None, np.ndarray]:
    """Cuts tokens at the separators, `block` of them at a time; a document can continue in the next
    text. Yields each document without its separator, and returns what follows the last one."""
    begun: list[np.ndarray] = []
    for text in texts:
        for begin in range(0, len(text), block):
            tokens = text[begin : begin + block]
            start = 0
            for end in np.flatnonzero(tokens == separator):
                yield np.concatenate([*begun, tokens[start:end]])
                begun, start = [], int(end) + 1
            begun.append(tokens[start:])
    return np.concatenate(begun) if begun else np.empty(0, np.int64)
