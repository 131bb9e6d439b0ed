"""A lock on a file: only the process that holds it writes.

The system locks the file, and unlocks it when the process is killed. The file is deleted before it
is released; whoever had opened it by then makes a new one.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from filelock import BaseFileLock, FileLock, Timeout

from .files import DatastoreError

# Of seconds: long enough to try again where the file was deleted between its opening and locking.
_PATIENCE, _PAUSE = 0.05, 0.005


def locked(path: Path, refusal: str) -> BaseFileLock:
    """Takes the lock whose file is at `path`; it is released when garbage-collected.

    Raises:
        DatastoreError: If another one holds it, with the message `refusal`; or if there is
            something else at `path`, even a link to a file.
        OSError: If it cannot be made, as where its folder is missing.
    """
    os.lstat(path.parent)  # filelock would make the folder again that another process has removed
    with suppress(FileNotFoundError):
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise DatastoreError(f"{path} is not a file, but should be that of a lock; delete it")
    # Without a lock of the system nothing would release it where the process is killed.
    lock = FileLock(path, _PATIENCE, thread_local=False, fallback_to_soft=False)
    try:
        lock.acquire(poll_interval=_PAUSE)
    except Timeout:
        raise DatastoreError(refusal) from None
    return lock


def release(lock: BaseFileLock) -> None:
    """Deletes the file of a lock and lets others take it; does nothing in a forked process."""
    if not lock.is_locked:
        return
    with suppress(OSError):  # Windows deletes no file that is open, and does not need to
        os.unlink(lock.lock_file)
    lock.release()
