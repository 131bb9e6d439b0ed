"""The folder of a retrieval cache: what was remembered outlives the process.

    config.json                  all segments are named in it, with sizes and checksums
    segment-00001.safetensors    a segment: tokens, suffixes, ends, prompt_lengths
    log-00007                    the newest calls, see log.py
    log-00006.damaged            a log of which not all could be read; nobody reads or deletes it
    .lock                        held by the process that has the cache open

As in a datastore, a file is never changed once config.json names it, and config.json is replaced in
one go. The logs from `first_log` on hold what is in no segment yet, in order: when a tail is
sealed, the next calls go into a new log, and the old ones are deleted once config.json names the
segment. So the folder is whole at every moment.

Each process begins a log of its own, with its first call: what it has found is never changed, and
to open a cache writes nothing (but config.json, where that is out of date). None of these files is
a link: a link, a pipe or a folder that has one of their names is refused. What a process that was
killed has left is known: files that config.json has retired, and segments with numbers that it has
not come to. Nothing else is deleted.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from reprlib import repr as short
from typing import Annotated, Any, ClassVar

import numpy as np
from transformers import PreTrainedTokenizerBase

from ...index.segments import Segment
from ...index.suffix_array import IndexedText
from ...store.files import CONFIG, DatastoreError, FileEntry, check_file, read_arrays, write_arrays
from ...store.fingerprint import check_tokenizer, public_name, tokenizer_fingerprint
from ...store.folder import LOCK, FolderConfig, delete, locked, token_dtype
from ...store.schema import Named, Range
from ..token_ids import LARGEST_ID
from .log import Call, SessionLog, read_log

logger = logging.getLogger("hf_refspec")

# As they are written: no number has two names.
_NUMBER = "([0-9]{5}|[1-9][0-9]{5,11})"
_LARGEST_NUMBER = 10**11  # one by one nobody gets so far, let alone to the last of the names
_MOST_MISSING = 1000  # logs; one that is further away from the others is not one of them
SEGMENT = Named("a segment", rf"segment-{_NUMBER}\.safetensors")
LOG = Named("a log", rf"log-{_NUMBER}")
_UNFINISHED = Named("an unfinished file", rf"\.({re.escape(CONFIG)}|{SEGMENT.pattern})\.new")
_DAMAGED = Named("a damaged log", rf"{LOG.pattern}\.damaged")
_INT32 = np.dtype(np.int32)
_COUNT = Range(1, 2**31 - 1)
_LARGEST_HEADER = 1 << 16


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
    vocab_size: Annotated[int, Range(1, LARGEST_ID + 1)]
    file: Annotated[FileEntry, SEGMENT]

    def arrays(self) -> dict[str, tuple[np.dtype, int]]:
        """The type and the length of each."""
        return {
            "tokens": (token_dtype(self.vocab_size), self.tokens),
            "suffixes": (_INT32, self.tokens),
            "ends": (_INT32, self.documents),
            "prompt_lengths": (_INT32, self.documents),
        }


@dataclass(frozen=True)
class SessionConfig(FolderConfig):
    """What the config.json of a retrieval cache says.

    Attributes:
        fingerprint, tokenizer (`str`, *optional*): `None` until a tokenizer is known.
        segments (`list[SegmentEntry]`): The segments, the oldest calls first.
        last_segment (`int`, *optional*): The largest number of a segment that was ever named;
            `None` in a folder of hf_refspec 0.1.
        first_log (`int`): The first log whose calls are in no segment.
        retired (`list[str]`): Files that the last config.json needed and this one does not, and
            that are about to be deleted.
    """

    NOUN = "retrieval cache"
    # From version 2 on the logs have records with marks, which older readers would cut off.
    HEADER: ClassVar[dict[str, Any]] = {
        "format": "hf_refspec retrieval cache",
        "format_version": 2,
    }
    OLDER: ClassVar[dict[str, tuple[Any, ...]]] = {"format_version": (1,)}
    FILES = (SEGMENT,)
    REMEDY = "choose a new path"

    fingerprint: str | None  # type: ignore[assignment]
    tokenizer: str | None  # type: ignore[assignment]
    segments: list[SegmentEntry]
    last_segment: Annotated[int, Range(0, _LARGEST_NUMBER)] | None
    first_log: Annotated[int, Range(1, _LARGEST_NUMBER)]
    retired: list[str]

    def check(self) -> None:
        for entry in self.segments:
            size = sum(dtype.itemsize * length for dtype, length in entry.arrays().values())
            if not size <= entry.file.size <= size + _LARGEST_HEADER:
                raise ValueError(f"{entry.file.name} cannot have {entry.file.size} bytes")
        named = {file.name for file in self.files()}
        last = max((_number(SEGMENT, name) for name in named), default=0)
        if self.last_segment is not None and self.last_segment < last:
            raise ValueError(f"last_segment is {self.last_segment}, though it names segment {last}")
        for name in self.retired:
            is_needed = name in named or _number(LOG, name) >= self.first_log
            if is_needed or not (SEGMENT.matches(name) or LOG.matches(name)):
                raise ValueError(f"{short(name)} cannot be retired")

    @classmethod
    def _newest(cls, content: dict[str, Any]) -> dict[str, Any]:
        content, version = super()._newest(content), content["format_version"]
        return {"last_segment": None, "retired": [], **content} if version == 1 else content


class SessionFolder:
    """A folder that is open, for this process alone; arguments as of [`RetrievalCache`].

    Attributes:
        path (`Path`): The folder.
        segments (`list[Segment]`): What was found, numbered from 0.
        calls (list of pairs of `np.ndarray`): Prompts and outputs after these.

    Raises:
        DatastoreError: If another process has it open, if it is damaged or no cache, or made with
            another tokenizer.
        OSError: If there is none and it cannot be made.
    """

    segments: list[Segment]
    calls: list[Call]
    _config: SessionConfig

    def __init__(self, path: Path, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self.path = path
        self._process = os.getpid()
        # Begun with the first call: a log that another process has written is not written to.
        self._log: SessionLog | None = None
        self._log_number = 1
        self._last_segment = 0
        self._damaged: set[str] = set()  # logs
        self._unnamed: dict[str, SegmentEntry] = {}
        # Why nothing can be appended: config.json does not say yet what it has to say before.
        self._unwritten = ""
        if path.exists() and not path.is_dir():
            raise DatastoreError(f"{path} is a file; name a retrieval cache's folder, or a new one")
        path.mkdir(parents=True, exist_ok=True)
        self._check_names()
        self._lock = locked(
            path / LOCK,
            f"{path} is open in another process (or in another RetrievalCache of this one); share "
            "that one, or give each process a path of its own",
        )
        try:
            self._open(tokenizer)
        except BaseException as error:
            self._lock.release()
            if isinstance(error, MemoryError):
                message = f"{path} cannot be read: there is not enough memory for it"
                raise DatastoreError(message) from None
            raise

    @property
    def is_ours(self) -> bool:
        """Whether this process opened it, and not one that this one was forked from."""
        return self._process == os.getpid()

    def append(self, prompt: np.ndarray, output: np.ndarray) -> None:
        """Adds a call to the log; see [`SessionLog.append`]."""
        if self._unwritten:
            raise OSError(self._unwritten)
        if self._log is not None and self._log.is_full:
            self.begin_log()
        if self._log is None:
            self._log = SessionLog(self.path / f"log-{self._log_number:05d}")
        self._log.append(prompt, output)

    def begin_log(self) -> int:
        """Ends the present log, if there is something in it, and returns the number of the one that
        the next call goes into. All calls before will be in segments."""
        if self._log is not None and self._log.size:
            self._log.close()
            self._log, self._log_number = None, self._log_number + 1
        return self._log_number

    def save(self, segment: Segment) -> Segment:
        """Writes a segment and opens it from the file."""
        number = self._last_segment = self._last_segment + 1
        arrays = {
            "tokens": segment.text.tokens,
            "suffixes": segment.text.suffixes,
            "ends": segment.ends,
            "prompt_lengths": segment.prompt_lengths,
        }
        file = write_arrays(self.path / f"segment-{number:05d}.safetensors", arrays)
        entry = SegmentEntry(
            len(segment.text.tokens), len(segment.ends), segment.text.vocab_size, file
        )
        saved = self._open_segment(entry, segment.first)
        self._unnamed[saved.name] = entry
        return saved

    def commit(self, segments: Sequence[Segment], first_log: int | None = None) -> None:
        """Names these segments in config.json, and deletes the files that it no longer needs.

        Args:
            segments (sequence of [`Segment`]): From `save`, or found.
            first_log (`int`, *optional*): The first log whose calls are in none of them.
        """
        old, first_log = self._config, max(self._config.first_log, first_log or 0)
        known = {entry.file.name: entry for entry in old.segments} | self._unnamed
        entries = [known[segment.name] for segment in segments]
        here = set(os.listdir(self.path))
        sealed = {name for name in here if 0 < _number(LOG, name) < first_log}
        superseded = known.keys() - {segment.name for segment in segments}
        retired = here & ((sealed - self._damaged) | superseded | set(old.retired))
        config = replace(
            old,
            segments=entries,
            last_segment=self._last_segment,
            first_log=first_log,
            retired=sorted(retired),
        )
        config.write(self.path)
        self._config, self._unnamed, self._unwritten = config, {}, ""
        for name in retired:
            delete(self.path / name)
        for name in sealed & self._damaged:
            self._keep_aside(name)

    def clear(self) -> None:
        """Deletes all calls, also those of damaged logs."""
        first_log = self.begin_log()
        # The newest first: if the process is killed over it, no log is missing between others.
        for name in sorted(os.listdir(self.path), key=lambda name: -_number(LOG, name)):
            if 0 < _number(LOG, name) < first_log or _DAMAGED.matches(name):
                delete(self.path / name)
        self.commit([], first_log)
        for name in os.listdir(self.path):
            if SEGMENT.matches(name):  # which config.json did not name
                delete(self.path / name)

    def close(self) -> None:
        """Lets other processes open it."""
        if self._log is not None:
            self._log.close()
        self._lock.release()

    def _check_names(self) -> None:
        """Refuses what has the name of a cache's file and cannot be one."""
        try:
            entries = list(os.scandir(self.path))
        except OSError as error:
            raise DatastoreError(f"{self.path} cannot be read: {error.strerror}") from None
        for entry in entries:
            number = max(_number(LOG, entry.name), _number(SEGMENT, entry.name))
            ours = number or entry.name in (CONFIG, LOCK) or _UNFINISHED.matches(entry.name)
            if ours and not entry.is_file(follow_symlinks=False):
                raise DatastoreError(
                    f"{self.path / entry.name} is not a file (or a link to one, which a retrieval "
                    "cache does not have); move it elsewhere"
                )
            if number > _LARGEST_NUMBER:
                raise DatastoreError(
                    f"{self.path / entry.name} is not of a retrieval cache, which does not come to "
                    "such a number; move it elsewhere"
                )

    def _open(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        """Reads all that there is, and only then changes what has to be changed."""
        found = self._read_config()
        self._config = found or SessionConfig(None, None, [], 0, 1, [])
        if self._config.last_segment is None:
            largest = max(_number(SEGMENT, name) for name in os.listdir(self.path))
            self._config = replace(self._config, last_segment=largest)
        if tokenizer is not None:
            self._check_tokenizer(tokenizer)
        self.segments = self._open_segments()
        self.calls = self._read_logs()
        if self._config != found:
            self._write_config(is_new=found is None)
        self._last_segment = self._config.last_segment or 0
        self._sweep([] if found is None else found.retired)

    def _read_config(self) -> SessionConfig | None:
        if os.path.lexists(self.path / CONFIG):
            return SessionConfig.read(self.path, follow_links=False)
        # A process that was killed over making it has left no more than these.
        others = set(os.listdir(self.path)) - {LOCK, f".{CONFIG}.new"}
        if others:
            raise DatastoreError(
                f"{self.path} is not a retrieval cache: it has no {CONFIG}, but {min(others)!r}; "
                "choose a new path"
            )
        return None

    def _check_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Refuses another tokenizer, or notes which one it is."""
        if self._config.fingerprint is not None:
            check_tokenizer(self.path, self._config, tokenizer, SessionConfig.REMEDY)
        else:
            self._config = replace(
                self._config,
                fingerprint=tokenizer_fingerprint(tokenizer),
                tokenizer=public_name(tokenizer),
            )

    def _open_segments(self) -> list[Segment]:
        segments: list[Segment] = []
        for entry in self._config.segments:
            check_file(self.path, entry.file, follow_links=False)
            segment = self._open_segment(entry, segments[-1].end if segments else 0)
            try:
                segment.check()
            except ValueError as error:
                raise DatastoreError(f"{self.path / entry.file.name} is damaged: {error}") from None
            segments.append(segment)
        return segments

    def _open_segment(self, entry: SegmentEntry, first: int) -> Segment:
        arrays = read_arrays(self.path, entry.file, entry.arrays(), follow_links=False)
        text = IndexedText(arrays["tokens"], arrays["suffixes"], entry.vocab_size)
        return Segment(first, text, arrays["ends"], arrays["prompt_lengths"], entry.file.name)

    def _read_logs(self) -> list[Call]:
        """The calls of all logs that are in no segment."""
        config = self._config
        numbers = {_number(LOG, name): name for name in os.listdir(self.path)}
        logs = {n: name for n, name in numbers.items() if n and name not in config.retired}
        before = [number for number in logs if number < config.first_log]
        if before:
            logger.warning(
                "%s: %d logs are there that %s says are no longer needed, and it has not retired "
                "them; their calls are remembered",
                self.path,
                len(before),
                CONFIG,
            )
            self._config = config = replace(config, first_log=min(before), retired=[])
        self._log_number = max(logs, default=config.first_log - 1) + 1
        missing = self._log_number - config.first_log - len(logs)
        if missing > _MOST_MISSING:
            raise DatastoreError(
                f"{self.path / logs[max(logs)]} is not one of its logs: {CONFIG} says that they "
                f"begin with log-{config.first_log:05d}, and {missing} are missing; move it "
                "elsewhere"
            )
        if missing:
            logger.warning(
                "%s: %d logs before log-%05d are missing; the calls in them are lost",
                self.path,
                missing,
                self._log_number,
            )
        calls: list[Call] = []
        for _, name in sorted(logs.items()):
            found, damaged = read_log(self.path / name)
            calls += found
            if damaged:
                self._damaged.add(name)
                logger.warning(
                    "%s is damaged: %d bytes of it cannot be read, the other %d calls are "
                    "remembered; it will be kept as %s.damaged",
                    self.path / name,
                    damaged,
                    len(found),
                    name,
                )
        return calls

    def _write_config(self, is_new: bool) -> None:
        path = self.path / CONFIG
        try:
            self._config.write(self.path)
        except OSError as error:
            if is_new:
                raise OSError(error.errno, error.strerror, str(path)) from None
            # On a full disk it can still be drafted from.
            self._unwritten = f"{path} cannot be written: {error.strerror}"

    def _sweep(self, retired: Sequence[str]) -> None:
        """Deletes what processes that were killed have left."""
        named = {file.name for file in self._config.files()}
        for name in os.listdir(self.path):
            number = _number(SEGMENT, name)
            if name in retired or _UNFINISHED.matches(name) or number > self._last_segment:
                delete(self.path / name)
            elif number and name not in named:
                logger.warning(
                    "%s is not named in %s, and nothing in it is remembered; delete it if that "
                    "is right",
                    self.path / name,
                    CONFIG,
                )

    def _keep_aside(self, log: str) -> None:
        aside = self.path / f"{log}.damaged"
        if not os.path.lexists(aside):
            with suppress(OSError):
                os.rename(self.path / log, aside)


def _number(kind: Named, name: str) -> int:
    """The number in the name of a file of this kind; 0 if it is of another."""
    match = re.fullmatch(kind.pattern, name)
    return int(match[1]) if match else 0
