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

import logging
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from transformers import PreTrainedTokenizerBase

from ...index.segments import Segment
from ...index.suffix_array import IndexedText
from ...store.files import CONFIG, DatastoreError, FileEntry, check_file, read_arrays, write_arrays
from ...store.fingerprint import check_tokenizer, public_name, tokenizer_fingerprint
from ...store.folder import LOCK, FolderConfig, delete, locked, sweep, token_dtype
from ...store.schema import Named, Range
from .log import SessionLog, read_log

logger = logging.getLogger("hf_refspec")

SEGMENT = Named("a segment", r"segment-([0-9]{5,})\.safetensors")
_LOG_NAME = r"log-([0-9]{5,})"
_OURS = re.compile(rf"\.?({SEGMENT.pattern}|{_LOG_NAME})(\.new)?|\.config\.json\.new")
_INT32 = np.dtype(np.int32)
_COUNT = Range(0, 2**62)


@dataclass(frozen=True)
class SegmentEntry:
    """A segment that config.json names.

    Attributes:
        tokens, documents (`int`): Entries of its arrays.
        vocab_size (`int`): Its token ids are below it.
        file (`FileEntry`): Where its arrays are.
    """

    tokens: Annotated[int, _COUNT]
    documents: Annotated[int, _COUNT]
    vocab_size: Annotated[int, _COUNT]
    file: Annotated[FileEntry, SEGMENT]


@dataclass(frozen=True)
class SessionConfig(FolderConfig):
    """What the config.json of a retrieval cache says.

    Attributes:
        fingerprint, tokenizer (`str`, *optional*): `None` until a tokenizer is known.
        segments (`list[SegmentEntry]`): The segments, the oldest calls first.
        first_log (`int`): The first log whose calls are in no segment.
    """

    NOUN = "retrieval cache"
    HEADER: ClassVar[dict[str, Any]] = {
        "format": "hf_refspec retrieval cache",
        "format_version": 1,
    }
    FILES = (SEGMENT,)
    REMEDY = "choose a new path"

    fingerprint: str | None  # type: ignore[assignment]
    tokenizer: str | None  # type: ignore[assignment]
    segments: list[SegmentEntry]
    first_log: Annotated[int, _COUNT]


class SessionFolder:
    """A folder that is open, for this process alone; arguments as of [`RetrievalCache`].

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
        self._lock = locked(
            path / LOCK,
            f"{path} is open in another process (or in another RetrievalCache of this one); share "
            "that one, or give each process a path of its own",
        )
        try:
            self._config = self._read_config(tokenizer)
            self._config.write(path)
            self.segments = self._open_segments()
            self.calls, self._log_number, size = self._read_logs()
            self._log = SessionLog(self._log_path(self._log_number), size)
            logs = range(self._config.first_log, self._log_number + 1)
            named = [file.name for file in self._config.files()]
            sweep(path, _OURS, [*named, *(self._log_path(number).name for number in logs)])
            self._number = self._largest_number(SEGMENT.pattern)
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
        """Names these segments in config.json, and deletes the files that it no longer names.

        Args:
            segments (sequence of [`Segment`]): From `save`, or found.
            first_log (`int`, *optional*): The first log whose calls are in none of them.
        """
        old, first_log = self._config, max(self._config.first_log, first_log or 0)
        known = {entry.file.name: entry for entry in old.segments} | self._unnamed
        entries = [known[segment.name] for segment in segments]
        self._config = replace(old, segments=entries, first_log=first_log)
        self._config.write(self.path)
        for name in known.keys() - {entry.file.name for entry in entries}:
            delete(self.path / name)
        self._unnamed.clear()
        for number in range(old.first_log, first_log):
            delete(self._log_path(number))

    def close(self) -> None:
        """Lets other processes open it."""
        self._log.close()
        self._lock.release()

    def _read_config(self, tokenizer: PreTrainedTokenizerBase | None) -> SessionConfig:
        if not (self.path / CONFIG).exists():
            # A process that was killed over making it has left no more than these.
            others = set(os.listdir(self.path)) - {LOCK, f".{CONFIG}.new"}
            if others:
                raise DatastoreError(
                    f"{self.path} is not a retrieval cache: it has no {CONFIG}, but {min(others)}; "
                    "choose a new path"
                )
            config = SessionConfig(None, None, [], 1)
        else:
            config = SessionConfig.read(self.path)
        if tokenizer is None:
            return config
        if config.fingerprint is not None:
            check_tokenizer(self.path, config, tokenizer, SessionConfig.REMEDY)
        fingerprint = tokenizer_fingerprint(tokenizer)
        return replace(config, fingerprint=fingerprint, tokenizer=public_name(tokenizer))

    def _open_segments(self) -> list[Segment]:
        self._unnamed: dict[str, SegmentEntry] = {}
        segments: list[Segment] = []
        for entry in self._config.segments:
            check_file(self.path, entry.file)
            segments.append(self._open_segment(entry, segments[-1].end if segments else 0))
        return segments

    def _open_segment(self, entry: SegmentEntry, first: int) -> Segment:
        arrays = read_arrays(
            self.path,
            entry.file,
            {
                "tokens": (token_dtype(entry.vocab_size), entry.tokens),
                "suffixes": (_INT32, entry.tokens),
                "ends": (_INT32, entry.documents),
                "prompt_lengths": (_INT32, entry.documents),
            },
        )
        text = IndexedText(arrays["tokens"], arrays["suffixes"], entry.vocab_size)
        return Segment(first, text, arrays["ends"], arrays["prompt_lengths"], entry.file.name)

    def _read_logs(self) -> tuple[list[tuple[np.ndarray, np.ndarray]], int, int]:
        """The calls of all logs, the number of the last one and the bytes of its whole records."""
        calls, size, first = [], 0, self._config.first_log
        last = max(first, self._largest_number(_LOG_NAME))
        for number in range(first, last + 1):
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

    def _largest_number(self, pattern: str) -> int:
        matches = (re.fullmatch(pattern, name) for name in os.listdir(self.path))
        return max([0, *(int(match[1]) for match in matches if match)])

    def _log_path(self, number: int) -> Path:
        return self.path / f"log-{number:05d}"
