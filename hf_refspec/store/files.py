"""The files of a stored folder: safetensors arrays, memory-mapped and never trusted."""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from reprlib import repr as short
from typing import Annotated, Any, BinaryIO

import numpy as np
from safetensors import safe_open

from ..corpus.untrusted import (
    BINARY,
    NO_WAITING,
    DatastoreError,
    one_line,
    open_file,
    printable,
    reading,
)

CONFIG = "config.json"
# No real header comes near this size; a larger one is not read.
_LARGEST_HEADER = 1 << 16
_BLOCK = 1 << 20
# A file of up to this size is compared with its checksum in a few milliseconds.
_SMALL = 1 << 22


@dataclass(frozen=True)
class FileEntry:
    """A file that config.json names, with its size in bytes and its checksum in hexadecimal."""

    name: str
    size: Annotated[int, range(2**62 + 1)]
    sha256: str


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yields a file to write into; once it is whole and synced, it replaces `path`."""
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)  # left by a killed process, or a link that somebody put there
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | NO_WAITING | BINARY
    created = os.fdopen(os.open(new, flags, 0o644), "w+b", buffering=0)
    try:
        with io.BufferedWriter(created) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


@dataclass(frozen=True)
class Blocks:
    """An array of `length` numbers, written block by block; the blocks may have any shape."""

    dtype: np.dtype
    length: int
    blocks: Iterable[np.ndarray]


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray | Blocks]) -> FileEntry:
    """Writes arrays of any shape into a safetensors file, flattened to (n,), or replaces the file
    atomically.

    The format is the length of a header (uint64), the header in JSON, and the arrays in a row. The
    library's own writer is not used: a killed process leaves its temporary file, and it copies all
    arrays into memory."""
    parts = {
        name: array if isinstance(array, Blocks) else Blocks(array.dtype, array.size, [array])
        for name, array in arrays.items()
    }
    # Larger numbers first, so that every array begins at a multiple of its item size.
    order = sorted(parts, key=lambda name: (-parts[name].dtype.itemsize, name))
    header = {}
    end = 0
    for name in order:
        part = parts[name]
        begin = end
        end += part.length * part.dtype.itemsize
        dtype = f"{part.dtype.kind.upper()}{8 * part.dtype.itemsize}"  # such as U16
        header[name] = {"dtype": dtype, "shape": [part.length], "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with replacing(path) as file:

        def write(data: bytes | memoryview) -> None:
            digest.update(data)
            file.write(data)

        write(len(text).to_bytes(8, "little") + text)
        for name in order:
            part = parts[name]
            length = 0
            for block in part.blocks:
                length += block.size
                numbers = np.ascontiguousarray(block, part.dtype.newbyteorder("<"))
                write(numbers.reshape(-1).view(np.uint8).data)
            if length != part.length:
                raise ValueError(f"{name} has {length} numbers instead of {part.length}")
    return FileEntry(path.name, 8 + len(text) + end, digest.hexdigest())


def write_bytes(path: Path, content: bytes) -> FileEntry:
    """Writes a file, or replaces it atomically; raises as [`write_arrays`]."""
    with replacing(path) as file:
        file.write(content)
    return FileEntry(path.name, len(content), hashlib.sha256(content).hexdigest())


def read_arrays(
    folder: Path,
    entry: FileEntry,
    expected: Mapping[str, tuple[Any, Any]],
    check_small: bool = False,
) -> dict[str, np.ndarray]:
    """Memory-maps the arrays of a file, without reading or checking their content; `expected` has
    the type of each array and its shape or length, `None` for any length. With `check_small` a file
    of up to 4 MiB is compared with its checksum as well."""
    path = folder / entry.name
    if check_small and entry.size <= _SMALL:
        check_file(folder, entry)
    with _open_entry(folder, entry) as file, reading(path):
        header = int.from_bytes(file.read(8), "little")
    try:
        if header > _LARGEST_HEADER:
            raise ValueError(f"its header should have {header} bytes")
        # safetensors maps a file without copying it only for torch.
        with reading(path), safe_open(path, framework="pt") as opened:
            arrays = {name: opened.get_tensor(name).numpy() for name in expected}
    except DatastoreError:
        raise
    except Exception as error:  # A bad header can fail in three libraries.
        raise DatastoreError(f"{path} is damaged: {one_line(error):.200}") from None
    for name, (dtype, shape) in expected.items():
        array = arrays[name]
        fits = array.dtype == dtype and array.ndim == 1 and array.flags.aligned
        length = prod(shape) if isinstance(shape, tuple) else shape
        if not fits or length not in (None, len(array)):
            raise DatastoreError(
                f"{path} is damaged: {name} is {array.dtype} of shape {short(array.shape)}, but "
                f"should be {np.dtype(dtype)} with "
                f"{'one dimension' if length is None else f'{length} entries'}"
            )
        if isinstance(shape, tuple):
            arrays[name] = array.reshape(shape)
    return arrays


def _open_entry(folder: Path, entry: FileEntry) -> BinaryIO:
    """Opens a file that config.json names; raises a DatastoreError if that is impossible."""
    path = folder / entry.name
    try:
        file = open_file(path)
    except OSError:  # the file or a folder of its path is missing
        raise DatastoreError(
            f"{path} cannot be read: it is missing, though {CONFIG} named it; if another process "
            "has changed the folder since, open it again"
        ) from None
    size = os.fstat(file.fileno()).st_size
    if size != entry.size:
        file.close()
        raise DatastoreError(
            f"{path} is damaged: it has {size} bytes, but {CONFIG} says {entry.size}"
        )
    return file


def blocks_of(folder: Path, entry: FileEntry) -> Iterator[bytes]:
    """The content of a file in blocks; raises a DatastoreError if its checksum differs."""
    path = folder / entry.name
    digest = hashlib.sha256()
    with _open_entry(folder, entry) as file, reading(path):
        for block in iter(partial(file.read, _BLOCK), b""):
            digest.update(block)
            yield block
    if digest.hexdigest() != entry.sha256:
        raise DatastoreError(
            f"{path} is damaged: its checksum is {digest.hexdigest()}, but {CONFIG} says "
            f"{printable(entry.sha256[:64])}"
        )


def check_file(folder: Path, entry: FileEntry) -> None:
    """Compares a whole file with its checksum; raises as [`blocks_of`]."""
    for _ in blocks_of(folder, entry):
        pass


def copy_file(folder: Path, entry: FileEntry, to: Path) -> None:
    """Copies a file into another folder; raises as [`blocks_of`] and [`replacing`]."""
    with replacing(to / entry.name) as copy:
        for block in blocks_of(folder, entry):
            copy.write(block)
