"""An append-only log of calls: what a process that was killed has written is still there.

A record is three uint32 (tokens of the prompt, tokens of the output, CRC-32 of these two and of
what follows), then the ids, int32; all little-endian. Nothing follows the last record, but a part
of one that a process was killed over.
"""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path

import numpy as np

_HEADER = struct.Struct("<III")
_IDS = np.dtype("<i4")


class SessionLog:
    """A log that is open for appending.

    Records are handed to the system, not forced to the disk: they outlive the process, but the last
    ones may be lost when the machine fails.

    Args:
        path (`Path`): The file; it is made if there is none.
        size (`int`, *optional*, defaults to 0): The bytes of its whole records; what follows them
            is cut off.
    """

    def __init__(self, path: Path, size: int = 0) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | getattr(os, "O_BINARY", 0))
        self._size = size
        os.ftruncate(self._descriptor, size)

    def append(self, prompt: np.ndarray, output: np.ndarray) -> None:
        """Appends a record: ids from 0 to 2**31 - 1, integer arrays of shape `(n,)`.

        Raises:
            OSError: If it cannot be written, as on a full disk. The log is as it was.
        """
        ids = np.concatenate((prompt, output)).astype(_IDS).tobytes()
        checksum = _checksum(len(prompt), len(output), ids)
        record = memoryview(_HEADER.pack(len(prompt), len(output), checksum) + ids)
        written = 0
        try:
            os.lseek(self._descriptor, self._size, os.SEEK_SET)
            while written < len(record):
                written += os.write(self._descriptor, record[written:])
        except BaseException:
            os.ftruncate(self._descriptor, self._size)
            raise
        self._size += len(record)

    def close(self) -> None:
        """No more is appended."""
        os.close(self._descriptor)


def read_log(path: Path) -> tuple[list[tuple[np.ndarray, np.ndarray]], int]:
    """Reads a log up to the first record that is not whole.

    Returns:
        The prompts and outputs (int32), and the bytes of the whole records.
    """
    content = path.read_bytes()
    calls, size = [], 0
    while size + _HEADER.size <= len(content):
        prompt_length, output_length, checksum = _HEADER.unpack_from(content, size)
        begin = size + _HEADER.size
        end = begin + _IDS.itemsize * (prompt_length + output_length)
        found = _checksum(prompt_length, output_length, content[begin:end])
        if end > len(content) or checksum != found:
            break
        ids = np.frombuffer(content, _IDS, prompt_length + output_length, begin)
        if len(ids) == 0 or ids.min() < 0:
            break
        calls.append((ids[:prompt_length], ids[prompt_length:]))
        size = end
    return calls, size


def _checksum(prompt_length: int, output_length: int, ids: bytes) -> int:
    return zlib.crc32(ids, zlib.crc32(struct.pack("<II", prompt_length, output_length)))
