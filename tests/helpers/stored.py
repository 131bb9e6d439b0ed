"""A datastore's config, a file of arrays, and other processes."""

import multiprocessing
import os
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

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
from hf_refspec.store.stored_folder import StoredFolder

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


def entry_of(path: Path) -> FileEntry:
    content = path.read_bytes()
    return FileEntry(path.name, len(content), sha256(content).hexdigest())


def readers(folder: Path, entry: FileEntry) -> list[Callable[[], Any]]:
    return [lambda: read_arrays(folder, entry, UINT16), lambda: check_file(folder, entry)]


def content_of(folder: Path) -> dict[str, bytes]:
    """All files of a folder."""
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def rewrite(stored: StoredFolder, name: str, **changes: np.ndarray) -> None:
    """Changes arrays of the file that config.json names so, and its checksum with them."""
    path = stored.path / getattr(stored.config, name).name
    entry = write_arrays(path, load_file(path) | changes)
    replace(stored.config, **{name: entry}).write(stored.path)


def flip_last_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def in_children(*functions: Callable[[], Any]) -> list[Any]:
    """Runs functions at once, each in a process of its own; returns what each returned, which can
    be pickled, or raised."""
    children = []
    for function in functions:
        receiver, sender = multiprocessing.Pipe(duplex=False)
        child = os.fork()
        if child == 0:
            try:
                result = function()
            except BaseException as error:
                result = type(error)(str(error))
            sender.send(result)
            os._exit(0)
        sender.close()
        children.append((child, receiver))
    results = [receiver.recv() for _, receiver in children]
    for child, _ in children:
        os.waitpid(child, 0)
    return results


def in_a_child(function: Callable[[], Any]) -> Any:
    """Runs a function in a process of its own; returns what it returned or raised."""
    return in_children(function)[0]
