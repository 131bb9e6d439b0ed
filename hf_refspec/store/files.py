"""Stored folders' files, memory-mapped and never trusted, and folders written whole or not at all.

A lock is a file that the system locks, and unlocks when the process is killed. The file is deleted
before it is released; a process that has opened it by then creates a new one.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import re
import shutil
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from reprlib import repr as short
from typing import Annotated, Any, BinaryIO

import numpy as np
from filelock import FileLock, Timeout
from safetensors import safe_open

from ..corpus.untrusted import (
    BINARY,
    NO_WAITING,
    DatastoreError,
    one_line,
    open_file,
    printable,
)

CONFIG = "config.json"
# No real header comes near this size; a larger one is not read.
_LARGEST_HEADER = 1 << 16
_BLOCK = 1 << 20
# A file of up to this size is compared with its checksum in a few milliseconds.
_SMALL = 1 << 22
logger = logging.getLogger("hf_refspec")
LOCK = ".lock"
# In seconds: long enough to retry where the lock's file was deleted between opening and locking.
_PATIENCE = 0.05
_PAUSE = 0.005


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
    """Writes arrays, flattened to (n,), into a safetensors file, or replaces it atomically.

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
    """Memory-maps the arrays of a file, without reading or checking their content.

    `expected` has the type of each array and its shape or length, `None` for any length. With
    `check_small` a file of up to 4 MiB is compared with its checksum as well."""
    path = folder / entry.name
    if check_small and entry.size <= _SMALL:
        check_file(folder, entry)
    with _open_entry(folder, entry) as file:
        header = int.from_bytes(file.read(8), "little")
    try:
        if header > _LARGEST_HEADER:
            raise ValueError(f"its header should have {header} bytes")
        # safetensors maps a file without copying it only for torch.
        with safe_open(path, framework="pt") as opened:
            arrays = {name: opened.get_tensor(name).numpy() for name in expected}
    except Exception as error:  # a bad header can fail in three libraries
        raise DatastoreError(f"{path} is damaged: {one_line(error):.200}") from None
    for name, (dtype, shape) in expected.items():
        array = arrays[name]
        if not array.flags.aligned:
            raise DatastoreError(f"{path} is damaged: {name} begins between two numbers")
        fits = array.dtype == dtype and array.ndim == 1
        length = prod(shape) if isinstance(shape, tuple) else shape
        if not fits or length not in (None, len(array)):
            wanted = "one dimension" if length is None else f"{length} entries"
            raise DatastoreError(
                f"{path} is damaged: {name} is {array.dtype} of shape {short(array.shape)}, but "
                f"should be {np.dtype(dtype)} with {wanted}"
            )
        if isinstance(shape, tuple):
            arrays[name] = array.reshape(shape)
    return arrays


def _open_entry(folder: Path, entry: FileEntry) -> BinaryIO:
    """Opens a file that config.json names; raises a DatastoreError if that is impossible."""
    path = folder / entry.name
    try:
        file = open_file(path)
    except (FileNotFoundError, NotADirectoryError):
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
    with _open_entry(folder, entry) as file:
        for block in iter(partial(file.read, _BLOCK), b""):
            digest.update(block)
            yield block
    if digest.hexdigest() != entry.sha256:
        checksums = f"{digest.hexdigest()}, but {CONFIG} says {printable(entry.sha256[:64])}"
        raise DatastoreError(f"{path} is damaged: its checksum is {checksums}")


def check_file(folder: Path, entry: FileEntry) -> None:
    """Compares a whole file with its checksum; raises as [`blocks_of`]."""
    for _ in blocks_of(folder, entry):
        pass


def copy_file(folder: Path, entry: FileEntry, to: Path) -> None:
    """Copies a file into another folder; raises as [`blocks_of`] and [`replacing`]."""
    with replacing(to / entry.name) as copy:
        for block in blocks_of(folder, entry):
            copy.write(block)


@contextmanager
def new_folder(place: str | os.PathLike) -> Iterator[Path]:
    """Yields a temporary sibling of `place`, emptied if it exists; renames it on success."""
    path = Path(place)
    _check_free(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.hf_refspec-build")
    refusal = f"{path} is being written by another process; wait for it or choose another path"
    with locked(new.with_name(f"{new.name}{LOCK}"), refusal):
        _check_free(path)  # another process may have finished it meanwhile
        with suppress(FileNotFoundError):
            shutil.rmtree(new)
        try:
            new.mkdir()
            yield new
            sync_folder(new)
            os.rename(new, path)
            sync_folder(path.parent)
        finally:
            shutil.rmtree(new, ignore_errors=True)


def _check_free(path: Path) -> None:
    if os.path.lexists(path):
        raise FileExistsError(
            f"{path} exists; choose another path, delete it, or extend it where it is a datastore"
        )


def check_writable(folder: Path) -> None:
    """Refuses a folder that cannot be written, or is in the Hub's cache, before work is lost."""
    as_effective_user = os.access in os.supports_effective_ids
    why = None
    if folder.is_dir() and not os.access(folder, os.W_OK, effective_ids=as_effective_user):
        why = "you may not write into it"
    if folder.resolve().match("datasets--*/snapshots/*"):
        why = "it is in the Hub's cache"
    if why is not None:
        raise PermissionError(
            f"{folder} cannot be changed: {why}; change a copy, which save_pretrained() makes"
        )


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Locks a folder against other writers; raises a DatastoreError if there is one already."""
    check_writable(folder)
    refusal = f"{folder} is being written by another process; wait for it, then try again"
    with locked(folder / LOCK, refusal):
        yield


@contextmanager
def locked(path: Path, refusal: str) -> Iterator[None]:
    """Holds the lock whose file is at `path`, and deletes the file at the end."""
    os.lstat(path.parent)  # filelock would create the folder that another process has removed
    with suppress(FileNotFoundError):
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise DatastoreError(f"{path} is in the place of a lock's file; delete it")
    # Only a lock of the system is released when the process is killed.
    lock = FileLock(path, _PATIENCE, thread_local=False, fallback_to_soft=False)
    try:
        lock.acquire(poll_interval=_PAUSE)
    except Timeout:
        raise DatastoreError(refusal) from None
    try:
        yield
    finally:
        if lock.is_locked:  # it is not in a forked process
            with suppress(OSError):  # Windows deletes no file that is open, and does not need to
                os.unlink(lock.lock_file)
            lock.release()


def sweep(
    folder: Path, patterns: Collection[re.Pattern[str]], keep: Iterable[FileEntry] = ()
) -> None:
    """Deletes files of an older version or a killed process: names that match and are not kept."""
    kept = {file.name for file in keep}
    for path in folder.iterdir():
        name = re.sub(r"^\.(.*)\.new$", r"\1", path.name)
        if path.name not in kept and any(pattern.fullmatch(name) for pattern in patterns):
            try:
                path.unlink(missing_ok=True)
            except OSError as error:  # it is still mapped into memory; a later sweep deletes it
                logger.debug("cannot delete %s: %s", path, error)


def sync_folder(folder: Path) -> None:
    """Forces the names of the files in a folder to the disk, where the system can do that."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
