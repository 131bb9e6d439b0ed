"""Folders that are written whole or not at all, by one process at a time.

A lock is a file that the system locks, and unlocks when the process is killed. The file is deleted
before it is released; a process that has opened it by then creates a new one.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import stat
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from .files import DatastoreError, FileEntry

logger = logging.getLogger("hf_refspec")

LOCK = ".lock"
# In seconds: long enough to retry where the lock's file was deleted between opening and locking.
_PATIENCE = 0.05
_PAUSE = 0.005


@contextmanager
def new_folder(place: str | os.PathLike) -> Iterator[Path]:
    """Yields a temporary sibling of `place`, and renames it to `place` on success. Removes the one
    that a killed process has left."""
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
