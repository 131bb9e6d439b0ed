"""The files of a stored folder: safetensors arrays, mapped into memory and never trusted."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, BinaryIO

import numpy as np
from safetensors import safe_open

from .schema import Range

CONFIG = "config.json"
# No real header comes near it; what is larger is not read.
_LARGEST_HEADER = 1 << 16


class DatastoreError(ValueError):
    """A stored folder that cannot be used: files are missing, damaged or for something else."""


@dataclass(frozen=True)
class FileEntry:
    """A file that config.json vouches for.

    Attributes:
        name (`str`): Its name in the folder.
        size (`int`): In bytes.
        sha256 (`str`): The checksum of all of it, in hexadecimal.
    """

    name: str
    size: Annotated[int, Range(0, 2**62)]
    sha256: str

    @classmethod
    def of(cls, path: Path) -> FileEntry:
        """Reads the file at `path`."""
        return cls(path.name, path.stat().st_size, sha256(path))


# Where a system lacks one, its files cannot be what the flag guards against.
_NO_WAITING = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_BINARY = getattr(os, "O_BINARY", 0)


def open_file(path: Path, follow_links: bool = True) -> BinaryIO:
    """Opens a regular file for reading; a pipe or a device is never waited for.

    Args:
        path (`Path`): The file.
        follow_links (`bool`, *optional*, defaults to `True`): Whether it may be a link to one, as
            in the cache of the Hub.

    Raises:
        FileNotFoundError, NotADirectoryError: If there is none.
        DatastoreError: If it is something else, or cannot be read.
    """
    try:
        descriptor = os.open(
            path, os.O_RDONLY | _NO_WAITING | _BINARY | (0 if follow_links else _NO_LINK)
        )
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise DatastoreError(f"{path} cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DatastoreError(f"{path} is not a file")
    return os.fdopen(descriptor, "rb")


def create_file(path: Path) -> BinaryIO:
    """Creates a file for writing where nothing is, not even a link.

    Raises:
        OSError: If something is there, or it cannot be written.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | _NO_WAITING | _BINARY | _NO_LINK
    return os.fdopen(os.open(path, flags, 0o644), "w+b", buffering=0)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields where to write a file that is at `path` only once it is whole and on the disk."""
    new = path.with_name(f".{path.name}.new")
    try:
        yield new
        with open(new, "r+b") as file:
            os.fsync(file.fileno())
        os.replace(new, path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


@dataclass(frozen=True)
class Blocks:
    """An array of one dimension that is written without ever being in memory as a whole.

    Attributes:
        dtype (`np.dtype`): The type of its numbers.
        length (`int`): How many there are.
        blocks (iterable of `np.ndarray`): Some of them at a time, in their order and any shape.
    """

    dtype: np.dtype
    length: int
    blocks: Iterable[np.ndarray]


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray | Blocks]) -> FileEntry:
    """Writes arrays of one dimension into a safetensors file, or replaces it in one go.

    The format is the length of a header (uint64), the header in JSON, and the arrays in a row. We
    write it ourselves: the library makes a temporary file of its own, which stays if the process is
    killed, and holds a copy of all arrays.

    Raises:
        OSError: If it cannot be written, as on a full disk.
    """
    parts = {
        name: array if isinstance(array, Blocks) else Blocks(array.dtype, len(array), [array])
        for name, array in arrays.items()
    }
    # The larger the numbers the earlier they stand: so all begin at a multiple of their size.
    order = sorted(parts, key=lambda name: (-parts[name].dtype.itemsize, name))
    header, end = {}, 0
    for name in order:
        part, begin = parts[name], end
        end += part.length * part.dtype.itemsize
        dtype = f"{part.dtype.kind.upper()}{8 * part.dtype.itemsize}"  # such as U16
        header[name] = {"dtype": dtype, "shape": [part.length], "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with replacing(path) as new, open(new, "wb") as file:
        content: Iterator[bytes | memoryview] = chain(
            [len(text).to_bytes(8, "little"), text], _bytes_of(parts, order)
        )
        for data in content:
            digest.update(data)
            file.write(data)
    return FileEntry(path.name, 8 + len(text) + end, digest.hexdigest())


def _bytes_of(parts: Mapping[str, Blocks], order: Iterable[str]) -> Iterator[memoryview]:
    """All arrays as bytes, little-endian, a block at a time."""
    for name in order:
        part, left = parts[name], parts[name].length
        for block in part.blocks:
            left -= block.size
            numbers = np.ascontiguousarray(block, part.dtype.newbyteorder("<"))
            yield numbers.reshape(-1).view(np.uint8).data
        if left:
            raise ValueError(f"{name} has {part.length - left} numbers instead of {part.length}")


def write_rows(
    path: Path, name: str, rows: Iterable[np.ndarray], shape: tuple[int, int]
) -> FileEntry:
    """Writes one float32 array of `shape` as [`write_arrays`], laid out in one dimension, without
    ever having all of it in memory: `rows` yields some of its rows at a time."""
    size = 4 * shape[0] * shape[1]
    about = {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}
    header = json.dumps({name: about}).encode()
    header += b" " * (-len(header) % 8)  # The numbers begin at a multiple of their size.
    with replacing(path) as new, open(new, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for some in rows:
            file.write(np.ascontiguousarray(some, "<f4").data)
    return FileEntry.of(path)


def read_arrays(
    folder: Path, entry: FileEntry, expected: Mapping[str, tuple[np.dtype, int | None]]
) -> dict[str, np.ndarray]:
    """Maps the one-dimensional arrays of a file into memory; their content is not read or checked.

    Args:
        folder, entry: The file.
        expected (`dict`): By name, each array's type and length; `None` is any length.

    Raises:
        DatastoreError: If the file is missing or not what it should be.
    """
    path = find_file(folder, entry)
    try:
        with open(path, "rb") as file:
            header = int.from_bytes(file.read(8), "little")
        if header > _LARGEST_HEADER:
            raise ValueError(f"its header should have {header} bytes")
        # Only into torch's tensors does safetensors map a file without copying it.
        with safe_open(path, framework="pt") as file:
            arrays = {name: file.get_tensor(name).numpy() for name in expected}
    except Exception as error:  # A bad header can fail in three libraries.
        raise DatastoreError(f"{path} is damaged: {error}") from None
    for name, (dtype, length) in expected.items():
        array = arrays[name]
        fits = array.dtype == dtype and array.ndim == 1 and array.flags.aligned
        if not fits or length not in (None, len(array)):
            raise DatastoreError(
                f"{path} is damaged: {name} is {array.dtype} of shape {array.shape}, but should "
                f"be {dtype} with {'one dimension' if length is None else f'{length} entries'}"
            )
    return arrays


def find_file(folder: Path, entry: FileEntry) -> Path:
    """The path of a file, which is not opened.

    Raises:
        DatastoreError: If it is missing, no regular file or of another size.
    """
    path = folder / entry.name
    try:
        found = path.stat()
    except FileNotFoundError:
        raise DatastoreError(
            f"{path} cannot be read: it is missing, though {CONFIG} names it"
        ) from None
    except OSError as error:
        raise DatastoreError(f"{path} cannot be read: {error}") from None
    if not stat.S_ISREG(found.st_mode):
        raise DatastoreError(f"{path} is not a file")
    if found.st_size != entry.size:
        raise DatastoreError(
            f"{path} is damaged: it has {found.st_size} bytes, but {CONFIG} says {entry.size}"
        )
    return path


def copy_file(folder: Path, entry: FileEntry, to: Path) -> None:
    """Copies a file into another folder; raises a DatastoreError as [`find_file`]."""
    shutil.copyfile(find_file(folder, entry), to / entry.name)


def check_file(folder: Path, entry: FileEntry) -> None:
    """Compares a whole file with its checksum; raises a DatastoreError if it differs."""
    path = find_file(folder, entry)
    try:
        found = sha256(path)
    except OSError as error:
        raise DatastoreError(f"{path} cannot be read: {error}") from None
    if found != entry.sha256:
        raise DatastoreError(
            f"{path} is damaged: its checksum is {found}, but {CONFIG} says {entry.sha256}"
        )


def sha256(path: Path) -> str:
    """The SHA-256 checksum of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
