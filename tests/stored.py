"""A datastore's config and a file of arrays, for tests of stored folders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from hf_refspec.store.datastore_config import (
    NgramsEntry,
    ShardEntry,
    StoreConfig,
)
from hf_refspec.store.files import (
    FileEntry,
    check_file,
    read_arrays,
    write_arrays,
)

SHARD = ShardEntry(
    tokens=7,
    documents=2,
    tokens_file=FileEntry("tokens-00001.safetensors", 100, "a" * 64),
    suffixes_file=FileEntry("suffixes-00001.safetensors", 200, "b" * 64),
)
NGRAMS = NgramsEntry([5, 4], 30, 7, FileEntry("ngrams-0123456789ab.safetensors", 300, "c" * 64))
SOURCE = {"corpus": "x", "n": [1, {"y": None}]}
TOKENIZER = FileEntry("tokenizer.json", 400, "d" * 64)
CONFIG = StoreConfig("f" * 32, "org/é", 300, SOURCE, [SHARD], NGRAMS, TOKENIZER)
UINT16 = {"tokens": (np.dtype(np.uint16), 4)}


def four_tokens(folder: Path) -> FileEntry:
    path = folder / "tokens-00001.safetensors"
    return write_arrays(path, {"tokens": np.arange(4, dtype=np.uint16)})


def readers(folder: Path, entry: FileEntry) -> list[Callable[[], Any]]:
    return [lambda: read_arrays(folder, entry, UINT16), lambda: check_file(folder, entry)]
