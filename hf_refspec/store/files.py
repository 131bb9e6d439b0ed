"""The files of a stored folder: safetensors arrays, mapped into memory and never trusted."""

from __future__ import annotations

import hashlib
import io
import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from reprlib import repr as short
from typing import Annotated, BinaryIO

import numpy as np
from safetensors import safe_open

from .printable import one_line, printable
from .schema import Range

CONFIG = "config.json"
# No real header comes near it; what is larger is not read.
_LARGEST_HEADER = 1 << 16
_BLOCK = 1 << 20


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
    if not follow_links and path.is_symlink():
        raise DatastoreError(f"{path} is a link, which is not followed; put the file itself there")
    flags = os.O_RDONLY | _NO_WAITING | _BINARY | (0 if follow_links else _NO_LINK)
    try:
        descriptor = os.open(path, flags)
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise unreadable(path, error) from None
    except ValueError:  # a null byte
        raise DatastoreError(f"{str(path)!r} cannot be the path of a file") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DatastoreError(f"{path} is not a file")
    return os.fdopen(descriptor, "rb")


def unreadable(path: Path, error: OSError | MemoryError) -> DatastoreError:
    """The error to raise for a file or folder that the system does not let us read, or that is more
    than it has memory for."""
    if isinstance(error, MemoryError):
        return DatastoreError(f"{path} cannot be read: there is not enough memory for it")
    return DatastoreError(f"{path} cannot be read: {error.strerror or one_line(error)}")


def create_file(path: Path) -> io.FileIO:
    """Creates a file for writing where nothing is, not even a link; it has no buffer.

    Raises:
        OSError: If something is there, or it cannot be written.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | _NO_WAITING | _BINARY | _NO_LINK
    return os.fdopen(os.open(path, flags, 0o644), "w+b", buffering=0)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yields a file to write into that is at `path` only once it is whole and on the disk.

    Raises:
        DatastoreError: If there is a folder in its place.
        OSError: If it cannot be written, as on a full disk; what was at `path` still is.
    """
    new = path.with_name(f".{path.name}.new")
    check_no_folder(new, path)
    # A process that was killed has left it, or somebody has put a link there.
    new.unlink(missing_ok=True)
    created = create_file(new)
    try:
        with io.BufferedWriter(created) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def check_no_folder(*paths: Path) -> None:
    """Raises a DatastoreError if there is a folder where a file is to be written."""
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            raise DatastoreError(
                f"{path} is in the way: it is a folder, but should be a file; move it elsewhere"
            )


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
    with replacing(path) as file:
        beginning: list[bytes | memoryview] = [len(text).to_bytes(8, "little"), text]
        for data in chain(beginning, _bytes_of(parts, order)):
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


def write_bytes(path: Path, content: bytes) -> FileEntry:
    """Writes a file, or replaces it in one go; raises as [`write_arrays`]."""
    with replacing(path) as file:
        file.write(content)
    return FileEntry(path.name, len(content), hashlib.sha256(content).hexdigest())


def read_arrays(
    folder: Path,
    entry: FileEntry,
    expected: Mapping[str, tuple[np.dtype, int | None]],
) -> dict[str, np.ndarray]:
    """Maps the one-dimensional arrays of a file into memory; their content is not read or checked.

    Args:
        folder, entry: The file.
        expected (`dict`): By name, each array's type and length; `None` is any length.

    Raises:
        DatastoreError: If the file is missing or not what it should be.
    """
    path = folder / entry.name
    try:
        with open_entry(folder, entry) as file:
            header = int.from_bytes(file.read(8), "little")
            if header > _LARGEST_HEADER:
                raise ValueError(f"its header should have {header} bytes")
            # Only into torch's tensors does safetensors map a file without copying it.
            with safe_open(_path_of(file, path), framework="pt") as opened:
                arrays = {name: opened.get_tensor(name).numpy() for name in expected}
    except DatastoreError:
        raise
    except (OSError, MemoryError) as error:
        raise unreadable(path, error) from None
    except Exception as error:  # A bad header can fail in three libraries.
        raise DatastoreError(f"{path} is damaged: {one_line(error):.200}") from None
    for name, (dtype, length) in expected.items():
        array = arrays[name]
        fits = array.dtype == dtype and array.ndim == 1 and array.flags.aligned
        if not fits or length not in (None, len(array)):
            raise DatastoreError(
                f"{path} is damaged: {name} is {array.dtype} of shape {short(array.shape)}, but "
                f"should be {dtype} with "
                f"{'one dimension' if length is None else f'{length} entries'}"
            )
    return arrays


def _path_of(file: BinaryIO, path: Path) -> str | Path:
    """A path of a file that is open, on systems that have one: at its own there may be something
    else by now."""
    of_descriptor = f"/dev/fd/{file.fileno()}"
    return of_descriptor if os.path.exists(of_descriptor) else path


def open_entry(folder: Path, entry: FileEntry, follow_links: bool = True) -> BinaryIO:
    """Opens a file that config.json names.

    Raises:
        DatastoreError: If it is missing, no regular file or of another size, or cannot be read.
    """
    path = folder / entry.name
    try:
        file = open_file(path, follow_links)
    except OSError:  # a folder of the path can be missing, or be none
        raise DatastoreError(
            f"{path} cannot be read: it is missing, though {CONFIG} names it"
        ) from None
    size = os.fstat(file.fileno()).st_size
    if size != entry.size:
        file.close()
        raise DatastoreError(
            f"{path} is damaged: it has {size} bytes, but {CONFIG} says {entry.size}"
        )
    return file


def read_entry(folder: Path, entry: FileEntry) -> bytes:
    """All of a file that config.json names, compared with its checksum; raises as
    [`check_file`]."""
    content = io.BytesIO()
    _check(folder, entry, copy=content)
    return content.getvalue()


def copy_file(folder: Path, entry: FileEntry, to: Path) -> None:
    """Copies a file into another folder; raises a DatastoreError as [`check_file`]."""
    with replacing(to / entry.name) as copy:
        _check(folder, entry, copy=copy)


def check_file(folder: Path, entry: FileEntry) -> None:
    """Compares a whole file with its checksum.

    Raises:
        DatastoreError: If it differs, or as [`open_entry`].
    """
    _check(folder, entry)


def _check(folder: Path, entry: FileEntry, copy: BinaryIO | None = None) -> None:
    """Reads a whole file, and writes it into another one if there is one."""
    path, digest = folder / entry.name, hashlib.sha256()
    with open_entry(folder, entry) as file:
        for block in _blocks(file, path):
            digest.update(block)
            if copy is not None:
                copy.write(block)
    if digest.hexdigest() != entry.sha256:
        raise DatastoreError(
            f"{path} is damaged: its checksum is {digest.hexdigest()}, but {CONFIG} says "
            f"{printable(entry.sha256[:64])}"
        )


def sha256(path: Path) -> str:
    """The SHA-256 checksum of a file, in hexadecimal; raises as [`open_file`]."""
    digest = hashlib.sha256()
    with open_file(path) as file:
        for block in _blocks(file, path):
            digest.update(block)
    return digest.hexdigest()


def _blocks(file: BinaryIO, path: Path) -> Iterator[bytes]:
    try:
        while block := file.read(_BLOCK):
            yield block
    except OSError as error:
        raise unreadable(path, error) from None
