"""Files that are not trusted: opened without waiting, and named with printable text in errors."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO


class DatastoreError(ValueError):
    """A stored folder that cannot be used: files are missing, damaged or for something else."""


# A system that lacks one of these flags has no files that the flag guards against.
NO_WAITING = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
BINARY = getattr(os, "O_BINARY", 0)


def printable(text: object) -> str:
    r"""Escapes control characters as Python does, such as `\x1b`: they can command a terminal."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in str(text)
    )


def one_line(error: BaseException) -> str:
    """The message of an error in one line."""
    return printable(" ".join(str(error).split()))


def open_file(path: Path) -> BinaryIO:
    """Opens a regular file, without waiting for a pipe or a device."""
    try:
        descriptor = os.open(path, os.O_RDONLY | NO_WAITING | BINARY)
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:  # it is a socket, or a link to itself
        raise DatastoreError(f"{path} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DatastoreError(f"{path} is not a file")
    return os.fdopen(descriptor, "rb")


def read_small(path: Path, largest: int) -> bytes:
    """The content of a file of at most `largest` bytes; raises as [`open_file`]."""
    with open_file(path) as file:
        content = file.read(largest + 1)
    if len(content) > largest:
        raise DatastoreError(f"{path} is too large: it has more than {largest:,} bytes")
    return content
