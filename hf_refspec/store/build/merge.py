"""Merges shards into a few large ones, as a log-structured store does.

Each new shard joins the preceding ones that are not much larger than all that came after them
([`due_to_join`]): sizes grow geometrically, a draft searches as many shards as the corpus has
orders of magnitude, and each token is rewritten as many times.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
from tqdm.auto import tqdm

from ...index.merge import merge_suffixes
from ..datastore_config import LARGEST_SHARD, ShardEntry, StoreConfig
from ..files import Blocks, DatastoreError, check_file
from ..folder import sync_folder
from ..shards import map_suffixes, map_tokens, next_number, write_part
from .engine import usable_cores

_BLOCK = 1 << 20
# A shard is joined with the newer ones unless it is more than 4 times as large as all of them: a
# larger factor leaves fewer shards to search, and writes each token more often.
GROWTH = 4


def due_to_join(sizes: Sequence[int], largest: int = LARGEST_SHARD) -> slice | None:
    """Which consecutive shards should be joined into one of at most `largest` tokens, if any."""
    for newest in range(len(sizes), 1, -1):  # the last ones may already be too large to join
        oldest, total = newest - 1, sizes[newest - 1]
        while (
            oldest > 0
            and sizes[oldest - 1] <= GROWTH * total
            and sizes[oldest - 1] + total <= largest
        ):
            oldest -= 1
            total += sizes[oldest]
        if newest - oldest > 1:
            return slice(oldest, newest)
    return None


def merge_due(
    folder: Path, config: StoreConfig, shards: Sequence[ShardEntry], threads: int | None, show: bool
) -> list[ShardEntry]:
    """Merges the shards that are due, and returns all shards after that.

    The old files stay, and nothing names the new ones yet."""
    groups = [[shard] for shard in shards]
    while due := due_to_join([token_count(group) for group in groups]):
        groups[due] = [list(chain(*groups[due]))]
    return _merged(folder, config, groups, threads, show)


def merge_all(
    folder: Path, config: StoreConfig, threads: int | None, show: bool
) -> list[ShardEntry]:
    """Merges all shards into as few as possible; see [`merge_due`]."""
    groups: list[list[ShardEntry]] = []
    for shard in config.shards:
        if groups and token_count(groups[-1]) + shard.tokens <= LARGEST_SHARD:
            groups[-1].append(shard)
        else:
            groups.append([shard])
    return _merged(folder, config, groups, threads, show)


def token_count(shards: Sequence[ShardEntry]) -> int:
    return sum(shard.tokens for shard in shards)


def _merged(
    folder: Path,
    config: StoreConfig,
    groups: list[list[ShardEntry]],
    threads: int | None,
    show: bool,
) -> list[ShardEntry]:
    """Merges each group into one shard."""
    number, shards = next_number(folder), []
    total = sum(token_count(group) for group in groups if len(group) > 1)
    hidden = not show or None
    with tqdm(
        desc="merging", total=total, unit=" tokens", unit_scale=True, disable=hidden, delay=1
    ) as bar:
        for group in groups:
            if len(group) == 1:
                shards += group
                continue
            shards.append(_merge(folder, config, group, number, threads or usable_cores(), bar))
            number += 1
    sync_folder(folder)
    return shards


def _merge(
    folder: Path,
    config: StoreConfig,
    shards: list[ShardEntry],
    number: int,
    threads: int,
    bar: tqdm,
) -> ShardEntry:
    for shard in shards:  # damaged content must not get a valid checksum
        check_file(folder, shard.tokens_file)
        check_file(folder, shard.suffixes_file)
    size, documents = token_count(shards), sum(shard.documents for shard in shards)
    texts = (map_tokens(folder, config, shard) for shard in shards)
    blocks = (text[i : i + _BLOCK] for text in texts for i in range(0, len(text), _BLOCK))
    tokens_file = write_part(folder, "tokens", number, Blocks(config.token_dtype, size, blocks))
    whole = ShardEntry(size, documents, tokens_file, tokens_file)
    tokens = map_tokens(folder, config, whole)
    parts = [(shard.tokens, partial(map_suffixes, folder, shard)) for shard in shards]

    def merged() -> Iterator[np.ndarray]:
        for block in merge_suffixes(tokens, parts, threads):
            bar.update(len(block))
            yield block

    suffixes = Blocks(np.dtype(np.int32), size, merged())
    try:
        suffixes_file = write_part(folder, "suffixes", number, suffixes)
    except ValueError as error:
        raise DatastoreError(f"{folder} cannot be merged: {error}") from None
    return ShardEntry(size, documents, tokens_file, suffixes_file)
