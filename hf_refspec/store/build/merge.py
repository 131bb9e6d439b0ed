"""Merges shards into few large ones, as a log-structured store does.

Each new shard joins those before it that are not much larger than all that came after them
([`due_to_join`]): the sizes grow geometrically, a draft searches as many shards as the corpus has
orders of magnitude, and a token is written again as often.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
from tqdm.auto import tqdm

from ...index.merge import merge_suffixes
from ...index.segments import due_to_join
from ..datastore_config import LARGEST_SHARD, ShardEntry, StoreConfig
from ..files import Blocks, DatastoreError, check_file, write_arrays
from ..folder import sync_folder
from ..shards import map_suffixes, map_tokens
from .engine import usable_cores

_BLOCK = 1 << 20


def merge_due(
    folder: Path, config: StoreConfig, shards: Sequence[ShardEntry], threads: int | None, show: bool
) -> list[ShardEntry]:
    """Merges those shards that should be one, so that their number stays small.

    Nothing names the new files yet, and the old ones stay.

    Args:
        folder (`Path`): The datastore's.
        config (`StoreConfig`): The token type, and names that are taken.
        shards (sequence of [`ShardEntry`]): All of them, in their order.
        threads (`int`, *optional*): How many merge. By default one for each usable core.
        show (`bool`): Whether to show the progress on a terminal.

    Returns:
        `list[ShardEntry]`: The shards that hold the same documents now.

    Raises:
        DatastoreError: If a file is not as it was written.
        OSError: If the new files cannot be written.
    """
    groups = [[shard] for shard in shards]
    while due := due_to_join([_size(group) for group in groups], LARGEST_SHARD):
        groups[due] = [list(chain(*groups[due]))]
    return _merged(folder, config, groups, threads, show)


def merge_all(
    folder: Path, config: StoreConfig, threads: int | None, show: bool
) -> list[ShardEntry]:
    """Merges all shards into as few as can be; arguments and errors as of [`merge_due`]."""
    groups: list[list[ShardEntry]] = []
    for shard in config.shards:
        if groups and _size(groups[-1]) + shard.tokens <= LARGEST_SHARD:
            groups[-1].append(shard)
        else:
            groups.append([shard])
    return _merged(folder, config, groups, threads, show)


def next_number(folder: Path) -> int:
    """The number of a new shard: none that a shard has, be it one of an extension that may be
    resumed, or had while another reader opened it."""
    numbers = (re.fullmatch(r"tokens-(\d+)\.safetensors", name) for name in os.listdir(folder))
    return max((int(number[1]) for number in numbers if number), default=0) + 1


def _size(shards: Sequence[ShardEntry]) -> int:
    return sum(shard.tokens for shard in shards)


def _merged(
    folder: Path,
    config: StoreConfig,
    groups: list[list[ShardEntry]],
    threads: int | None,
    show: bool,
) -> list[ShardEntry]:
    """Makes one shard of each group."""
    number = next_number(folder)
    total = sum(_size(group) for group in groups if len(group) > 1)
    shards = []
    with tqdm(
        desc="merging",
        total=total,
        unit=" tokens",
        unit_scale=True,
        disable=not show or None,
        delay=1,
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
    for shard in shards:  # what is damaged must not get a checksum that is right
        check_file(folder, shard.tokens_file)
        check_file(folder, shard.suffixes_file)
    size, documents = _size(shards), sum(shard.documents for shard in shards)
    names = (f"{name}-{number:05d}.safetensors" for name in ("tokens", "suffixes"))
    tokens_path, suffixes_path = (folder / name for name in names)
    texts = (map_tokens(folder, config, shard) for shard in shards)
    blocks = (text[i : i + _BLOCK] for text in texts for i in range(0, len(text), _BLOCK))
    tokens_file = write_arrays(tokens_path, {"tokens": Blocks(config.token_dtype, size, blocks)})
    whole = ShardEntry(size, documents, tokens_file, tokens_file)
    tokens = map_tokens(folder, config, whole)
    parts = [(shard.tokens, partial(map_suffixes, folder, shard)) for shard in shards]

    def suffixes() -> Iterator[np.ndarray]:
        for block in merge_suffixes(tokens, parts, threads):
            bar.update(len(block))
            yield block

    try:
        suffixes_file = write_arrays(
            suffixes_path, {"suffixes": Blocks(np.dtype(np.int32), size, suffixes())}
        )
    except ValueError as error:
        raise DatastoreError(f"{folder} cannot be merged: {error}") from None
    return ShardEntry(size, documents, tokens_file, suffixes_file)
