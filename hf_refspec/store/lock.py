"""A lock on a file: who holds it is the only one that writes.

It is a file of its own that is locked by the system, and unlocked by it if the process is killed.
Who lets go of it may delete it. Whoever had it open by then waits for nothing: a lock counts only
while its file is the one that is at its path.
"""

from __future__ import annotations

import os
import stat
import sys
from contextlib import suppress
from pathlib import Path

from .files import DatastoreError

_FLAGS = os.O_RDWR | os.O_CREAT | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0)


class Lock:
    """A lock that is held, see [`locked`]; who forgets it lets go of it."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor: int | None = descriptor
        self._process = os.getpid()

    def release(self, delete: bool = False) -> None:
        """Lets others take it, if it is still held; with `delete` its file goes."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        if os.getpid() != self._process:
            os.close(descriptor)  # it is still held by the process that this one was forked from
            return
        if delete:
            # Before others can take it: the next one makes a new file. Windows lets no file go
            # that is open, and none of them needs to.
            with suppress(OSError):
                self.path.unlink()
        _let_go(descriptor)  # a process that was forked meanwhile has it open as well
        os.close(descriptor)

    def __del__(self) -> None:
        self.release()


def locked(path: Path, refusal: str) -> Lock:
    """Takes the lock whose file is at `path`, without waiting.

    Raises:
        DatastoreError: If another one holds it, with the message `refusal`; or if there is
            something else at `path`, even a link to a file.
        OSError: If it cannot be made.
    """
    while True:
        descriptor = _opened(path)
        try:
            if not _is_taken(descriptor):
                raise DatastoreError(refusal)
            if _is_at(descriptor, path):
                return Lock(path, descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # it was deleted between its opening and its locking


def _opened(path: Path) -> int:
    if path.is_symlink():
        raise DatastoreError(f"{path} is a link, but should be the file of a lock; delete it")
    refusal = f"{path} is not a file, but should be that of a lock; delete it"
    with suppress(FileNotFoundError):
        if not stat.S_ISREG(os.lstat(path).st_mode):  # a folder or a socket cannot even be opened
            raise DatastoreError(refusal)
    descriptor = os.open(path, _FLAGS, 0o644)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DatastoreError(refusal)
    return descriptor


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


if sys.platform == "win32":
    import msvcrt

    def _is_taken(descriptor: int) -> bool:
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

    def _let_go(descriptor: int) -> None:
        msvcrt.locking(descriptor, msvcrt.LK_UNLCK, 1)

else:
    import fcntl

    def _is_taken(descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _let_go(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
