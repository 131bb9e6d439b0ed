"""The folder of a retrieval cache: what was remembered outlives the process.

    config.json                  all segments are named in it, with sizes and checksums
    segment-00001.safetensors    a segment: tokens, suffixes, ends, prompt_lengths
    log-00007                    the newest calls, see session_log
    .lock                        held by the process that has the cache open

As in a datastore, a file is never changed once config.json names it, and config.json is replaced in
one go. The logs from `first_log` on hold what is in no segment yet, in order: when a tail is
sealed, the next calls go into a new log, and the old one is deleted once config.json names the
segment. So the folder is whole at every moment.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from transformers import PreTrainedTokenizerBase

from ...index.segments import Segment
from ...index.suffix_array import IndexedText
from ...store.fingerprint import tokenizer_fingerprint
from ...store.folder import (
    CONFIG,
    DatastoreError,
    FileEntry,
    check_file,
    read_arrays,
    sync_folder,
    write_arrays,
)
from .log import SessionLog, read_log

logger = logging.getLogger("hf_refspec")

FORMAT = "hf_refspec retrieval cache"
FORMAT_VERSION = 1
_SEGMENT_NAME = re.compile(r"segment-[0-9]{5,}\.safetensors")
_LOG_NAME = re.compile(r"log-([0-9]{5,})")
_LARGEST_CONFIG = 1 << 23
_INT32 = np.dtype(np.int32)


@dataclass(frozen=True)
class SegmentEntry:
    """A segment that config.json names.

    Attributes:
        tokens, documents (`int`): Entries of its arrays.
        vocab_size (`int`): Its token ids are below it.
        file (`FileEntry`): Where its arrays are.
    """

    tokens: int
    documents: int
    vocab_size: int
    file: FileEntry


class SessionFolder:
    """A folder that is open, for this process alone.

    Args:
        path (`Path`): It is made if there is none.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): To make sure that the cache was made
            with it.

    Attributes:
        segments (`list[Segment]`): What was found, numbered from 0.
        calls (list of pairs of `np.ndarray`): Prompts and outputs after these.

    Raises:
        DatastoreError: If another process has it open, if it is damaged or no cache, or made with
            another tokenizer.
        OSError: If it cannot be written.
    """

    def __init__(self, path: Path, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        self._lock = _locked(path)
        try:
            self._entries, self._first_log = self._read_config(tokenizer)
            self._write_config(self._entries, self._first_log)
            self.segments = self._open_segments()
            self.calls, self._log_number, size = self._read_logs()
            self._log = SessionLog(self._log_path(self._log_number), size)
            self._delete_strays()
        except BaseException:
            self._lock.release()
            raise

    def append(self, prompt: np.ndarray, output: np.ndarray) -> None:
        """Adds a call to the log; see [`SessionLog.append`]."""
        self._log.append(prompt, output)

    def begin_log(self) -> int:
        """Begins a new log and returns its number. All calls before it will be in segments."""
        log = SessionLog(self._log_path(self._log_number + 1))
        self._log.close()
        self._log, self._log_number = log, self._log_number + 1
        return self._log_number

    def save(self, segment: Segment) -> Segment:
        """Writes a segment and opens it from the file."""
        self._number += 1
        arrays = {
            "tokens": segment.text.tokens,
            "suffixes": segment.text.suffixes,
            "ends": segment.ends,
            "prompt_lengths": segment.prompt_lengths,
        }
        file = write_arrays(self.path / f"segment-{self._number:05d}.safetensors", arrays)
        entry = SegmentEntry(
            len(segment.text.tokens), len(segment.ends), segment.text.vocab_size, file
        )
        saved = self._open_segment(entry, segment.first)
        self._unnamed[saved.name] = entry
        return saved

    def commit(self, segments: Sequence[Segment], first_log: int | None = None) -> None:
        """Makes config.json name these segments, and deletes what it no longer names.

        Args:
            segments (sequence of [`Segment`]): From `save`, or found.
            first_log (`int`, *optional*): The first log whose calls are in none of them.
        """
        known = {entry.file.name: entry for entry in self._entries} | self._unnamed
        entries, old_log = [known[segment.name] for segment in segments], self._first_log
        self._write_config(entries, max(old_log, first_log or 0))
        for name in known.keys() - {entry.file.name for entry in entries}:
            self._delete(self.path / name)
        self._unnamed.clear()
        for number in range(old_log, self._first_log):
            self._delete(self._log_path(number))

    def close(self) -> None:
        """Lets other processes open it."""
        self._log.close()
        self._lock.release()

    def _read_config(
        self, tokenizer: PreTrainedTokenizerBase | None
    ) -> tuple[list[SegmentEntry], int]:
        self._fingerprint = None if tokenizer is None else tokenizer_fingerprint(tokenizer)
        self._tokenizer = getattr(tokenizer, "name_or_path", None)
        path = self.path / CONFIG
        if not path.exists():
            # A process that was killed over making it has left no more than these.
            made_first = (".lock", f".{CONFIG}.new")
            others = [each for each in os.listdir(self.path) if each not in made_first]
            if others:
                raise DatastoreError(
                    f"{self.path} is not a retrieval cache: it has no {CONFIG}, but {others[0]}; "
                    "choose a new path"
                )
            return [], 1
        try:
            if path.stat().st_size > _LARGEST_CONFIG:
                raise ValueError("it is too large")
            content = json.loads(path.read_bytes())
            if content["format"] != FORMAT:
                raise KeyError("format")
            if content["format_version"] != FORMAT_VERSION:
                raise DatastoreError(
                    f"{path} has format_version {content['format_version']!r}, but this hf_refspec "
                    f"reads only {FORMAT_VERSION}; choose a new path"
                )
            fingerprint, name = content["fingerprint"], content["tokenizer"]
            entries = [_parse_segment(each) for each in content["segments"]]
            first_log = _whole(content["first_log"])
        except DatastoreError:
            raise
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise DatastoreError(
                f"{path} is damaged, or not a retrieval cache's ({error!r}); delete {self.path} or "
                "choose a new path"
            ) from None
        if None not in (fingerprint, self._fingerprint) and fingerprint != self._fingerprint:
            raise DatastoreError(
                f"{self.path} remembers calls of another tokenizer: {name} with the fingerprint "
                f"{fingerprint}, not {self._tokenizer} with {self._fingerprint}; choose a new path"
            )
        if self._fingerprint is None:
            self._fingerprint, self._tokenizer = fingerprint, name
        return entries, first_log

    def _open_segments(self) -> list[Segment]:
        self._unnamed: dict[str, SegmentEntry] = {}
        segments: list[Segment] = []
        for entry in self._entries:
            check_file(self.path, entry.file)
            segments.append(self._open_segment(entry, segments[-1].end if segments else 0))
        return segments

    def _open_segment(self, entry: SegmentEntry, first: int) -> Segment:
        dtype = np.dtype(np.uint16 if entry.vocab_size < 2**16 else np.uint32)
        arrays = read_arrays(
            self.path,
            entry.file,
            {
                "tokens": (dtype, entry.tokens),
                "suffixes": (_INT32, entry.tokens),
                "ends": (_INT32, entry.documents),
                "prompt_lengths": (_INT32, entry.documents),
            },
        )
        text = IndexedText(arrays["tokens"], arrays["suffixes"], entry.vocab_size)
        return Segment(first, text, arrays["ends"], arrays["prompt_lengths"], entry.file.name)

    def _read_logs(self) -> tuple[list[tuple[np.ndarray, np.ndarray]], int, int]:
        """The calls of all logs, the number of the last one and the bytes of its whole records."""
        calls, size = [], 0
        last = max([self._first_log, *_numbers(self.path, _LOG_NAME)])
        for number in range(self._first_log, last + 1):
            path = self._log_path(number)
            size = 0
            if path.exists():
                found, size = read_log(path)
                calls += found
                lost = path.stat().st_size - size
                if lost:
                    logger.warning(
                        "%s: its last %d bytes are no whole record and are dropped", path, lost
                    )
        return calls, last, size

    def _delete_strays(self) -> None:
        """Deletes what a process that was killed has left, and finds the next free number."""
        named = {entry.file.name for entry in self._entries}
        for name in os.listdir(self.path):
            log = _LOG_NAME.fullmatch(name)
            if log and int(log[1]) >= self._first_log:
                continue
            if _ours(name) and name not in named and name not in (CONFIG, ".lock"):
                self._delete(self.path / name)
        self._number = max([0, *_numbers(self.path, re.compile(r"segment-([0-9]+)\..*"))])

    def _write_config(self, entries: list[SegmentEntry], first_log: int) -> None:
        content = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "fingerprint": self._fingerprint,
            "tokenizer": self._tokenizer,
            "segments": [asdict(entry) for entry in entries],
            "first_log": first_log,
        }
        new = self.path / f".{CONFIG}.new"
        with open(new, "w", encoding="utf-8") as file:
            file.write(json.dumps(content, indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, self.path / CONFIG)
        sync_folder(self.path)
        self._entries, self._first_log = entries, first_log

    def _delete(self, path: Path) -> None:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:  # where it is still mapped into memory; it goes when next opened
            logger.debug("cannot delete %s: %s", path, error)

    def _log_path(self, number: int) -> Path:
        return self.path / f"log-{number:05d}"


def _locked(path: Path) -> FileLock:
    lock = FileLock(path / ".lock", thread_local=False)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise DatastoreError(
            f"{path} is open in another process (or in another RetrievalCache of this one); share "
            "that one, or give each process a path of its own"
        ) from None
    return lock


def _ours(name: str) -> bool:
    """Whether a file of this name may be one that a cache has written."""
    plain = name.removeprefix(".").removesuffix(".new")
    known = plain in (CONFIG, "lock") or _LOG_NAME.fullmatch(plain)
    return bool(known or _SEGMENT_NAME.fullmatch(plain))


def _numbers(path: Path, pattern: re.Pattern[str]) -> list[int]:
    return [int(match[1]) for name in os.listdir(path) if (match := pattern.fullmatch(name))]


def _parse_segment(content: Any) -> SegmentEntry:
    file = content["file"]
    # Else a cache could name a file outside of its folder.
    if not isinstance(file["name"], str) or not _SEGMENT_NAME.fullmatch(file["name"]):
        raise ValueError(f"{file['name']!r} is not the name of a segment")
    entry = FileEntry(file["name"], _whole(file["size"]), str(file["sha256"]))
    tokens, documents = _whole(content["tokens"]), _whole(content["documents"])
    return SegmentEntry(tokens, documents, _whole(content["vocab_size"]), entry)


def _whole(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} should be a whole number")
    return value
