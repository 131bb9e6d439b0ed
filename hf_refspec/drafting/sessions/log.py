"""An append-only log of calls: what a process that was killed has written is still there.

A record is, little-endian:

    mark             4 bytes, f5 68 66 f6
    prompt, output   two uint32, how many tokens they have
    checksums        two uint32, the CRC-32 of these two numbers and that of the ids
    ids              int32, those of the prompt and of the output

No id is above 2**24, so that no ids look like a mark: behind damage the next record can be found. A
log is written by one process, from its beginning, and never changed by another one. Its last record
may have been cut short, when that process was killed; the first checksum tells this from damage.

hf_refspec 0.1 wrote records without marks: the two lengths, the CRC-32 of all else, the ids.
"""

from __future__ import annotations

import os
import struct
import zlib
from contextlib import suppress
from pathlib import Path

import numpy as np

from ...store.files import DatastoreError, create_file, open_file
from ..token_ids import LARGEST_ID

Call = tuple[np.ndarray, np.ndarray]

# Tokens of a call, prompt and output. No model takes so many.
LONGEST_CALL = 1 << 24
_MARK = b"\xf5hf\xf6"
_HEADER = struct.Struct("<4sIIII")
_LENGTHS = struct.Struct("<II")
_UNMARKED_HEADER = struct.Struct("<III")
_IDS = np.dtype("<i4")
# A log of so many bytes is full: there are larger ones only by a single record.
_FULL = 1 << 22
_LARGEST_LOG = _FULL + _HEADER.size + LONGEST_CALL * _IDS.itemsize
# Damaged places after which a log is not searched further: to look at millions would take minutes.
_MOST_DAMAGES = 1000


class SessionLog:
    """A new log.

    Records are handed to the system, not forced to the disk: they outlive the process, but the last
    ones may be lost when the machine fails.

    Args:
        path (`Path`): The file; nothing must be there.

    Attributes:
        size (`int`): The bytes of its records.

    Raises:
        OSError: If it cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = create_file(path)
        self.size = 0

    @property
    def is_full(self) -> bool:
        """Whether the next record belongs into another log."""
        return self.size >= _FULL

    def append(self, prompt: np.ndarray, output: np.ndarray) -> None:
        """Appends a record: ids from 0 to `LARGEST_ID`, integer arrays of shape `(n,)` with at most
        `LONGEST_CALL` together.

        Raises:
            OSError: If it cannot be written, as on a full disk. The log is as it was.
        """
        data, written = memoryview(record(prompt, output)), 0
        try:
            self._file.seek(self.size)
            while written < len(data):
                written += os.write(self._file.fileno(), data[written:])
        except BaseException as error:
            with suppress(OSError):  # else the next record is written over it
                self._file.truncate(self.size)
            if isinstance(error, OSError):
                raise OSError(error.errno, error.strerror, str(self.path)) from None
            raise
        self.size += len(data)

    def close(self) -> None:
        """No more is appended."""
        self._file.close()


def record(prompt: np.ndarray, output: np.ndarray) -> bytes:
    """A record of a log."""
    ids = np.concatenate((prompt, output)).astype(_IDS).tobytes()
    lengths = _LENGTHS.pack(len(prompt), len(output))
    return _HEADER.pack(_MARK, len(prompt), len(output), zlib.crc32(lengths), zlib.crc32(ids)) + ids


def read_log(path: Path) -> tuple[list[Call], int]:
    """Reads the whole records of a log, also those behind damaged ones.

    Returns:
        The prompts and outputs (int32), and how many bytes are damaged; a last record that was cut
        short is not.

    Raises:
        FileNotFoundError: If there is none.
        DatastoreError: If it cannot be read, is a link or no file, or larger than any log.
    """
    with open_file(path, follow_links=False) as file:
        size = os.fstat(file.fileno()).st_size
        if size > _LARGEST_LOG:
            raise DatastoreError(
                f"{path} is damaged: it has {size} bytes, and no log has more than {_LARGEST_LOG}; "
                "move it elsewhere"
            )
        try:
            content = file.read(size)
        except (OSError, MemoryError) as error:
            raise DatastoreError(f"{path} cannot be read: {error!r}") from None
    if _MARK in content or _MARK.startswith(content):
        return _read_marked(content)
    return _read_unmarked(content)


def _read_marked(content: bytes) -> tuple[list[Call], int]:
    calls: list[Call] = []
    place = damaged = damages = 0
    while place < len(content) and damages < _MOST_DAMAGES:
        end = _end_of_record(content, place)
        call = None if end is None else _read_record(content, place, end)
        if end is not None and call is not None:
            calls.append(call)
            place = end
            continue
        following = content.find(_MARK, place + 1)
        if following < 0 and end is not None and end > len(content):
            return calls, damaged  # it was cut short
        following = following if following >= 0 else len(content)
        damaged, damages, place = damaged + following - place, damages + 1, following
    return calls, damaged + len(content) - place


def _end_of_record(content: bytes, begin: int) -> int | None:
    """Where the record that begins here ends, maybe behind the content; `None` if none begins."""
    header = content[begin : begin + _HEADER.size]
    if len(header) < _HEADER.size:
        return begin + _HEADER.size if _MARK.startswith(header[: len(_MARK)]) else None
    mark, prompt_length, output_length, checksum, _ = _HEADER.unpack(header)
    length = prompt_length + output_length
    if mark != _MARK or checksum != zlib.crc32(_LENGTHS.pack(prompt_length, output_length)):
        return None
    return begin + _HEADER.size + length * _IDS.itemsize if length <= LONGEST_CALL else None


def _read_record(content: bytes, begin: int, end: int) -> Call | None:
    ids = begin + _HEADER.size
    # A mark among the ids is looked for first: so no byte is read often, whatever the lengths say.
    if end > len(content) or content.find(_MARK, ids, end) >= 0:
        return None
    _, prompt_length, _, _, checksum = _HEADER.unpack_from(content, begin)
    return (
        _call(content[ids:end], prompt_length) if checksum == zlib.crc32(content[ids:end]) else None
    )


def _read_unmarked(content: bytes) -> tuple[list[Call], int]:
    calls: list[Call] = []
    place = damaged = damages = 0
    while place + _UNMARKED_HEADER.size <= len(content) and damages < _MOST_DAMAGES:
        prompt_length, output_length, checksum = _UNMARKED_HEADER.unpack_from(content, place)
        begin = place + _UNMARKED_HEADER.size
        end = begin + (prompt_length + output_length) * _IDS.itemsize
        if end > len(content):
            break
        # Where a record ends only its lengths tell: behind a damaged one they are still believed.
        lengths = _LENGTHS.pack(prompt_length, output_length)
        call = _call(content[begin:end], prompt_length)
        if call is not None and checksum == zlib.crc32(content[begin:end], zlib.crc32(lengths)):
            calls.append(call)
        else:
            damaged, damages = damaged + end - place, damages + 1
        place = end
    return calls, damaged + len(content) - place


def _call(ids: bytes, prompt_length: int) -> Call | None:
    """The prompt and the output; `None` if there is nothing, or what cannot be an id."""
    array = np.frombuffer(ids, _IDS)
    if len(array) == 0 or array.min() < 0 or array.max() > LARGEST_ID:
        return None
    return array[:prompt_length], array[prompt_length:]
