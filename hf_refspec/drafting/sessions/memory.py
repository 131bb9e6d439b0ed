"""The sessions of a `RetrievalCache`, for many threads at once."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...index.segments import Segment, Tail, due_to_join, joined
from ...index.suffix_array import IndexedText
from ...index.token_buffer import LinkedText
from ...store.files import DatastoreError
from .folder import SessionFolder
from .log import LONGEST_CALL
from .similar_prompts import SimilarPrompts

logger = logging.getLogger("hf_refspec")

# Tokens after which the tail is sealed. To search a longer one takes longer than one segment more.
SEAL_TOKENS = 1 << 13
# The oldest segment is rewritten when less than this fraction of it is still remembered.
_FRACTION_KEPT = 7 / 8


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """The sessions at one moment, to draft from without waiting for a lock.

    Attributes:
        segments (`tuple[IndexedText, ...]`): All but the newest sessions.
        tail (`LinkedText`): The newest.
        largest_id (`int`): The largest token id so far; -1 if there is none.
    """

    segments: tuple[IndexedText, ...]
    tail: LinkedText
    largest_id: int


class Memory:
    """Sessions, numbered in the order they came in; the oldest are forgotten first.

    A session that is forgotten can still be seen by a draft for a while: a segment is rewritten
    when an eighth of it is forgotten. Sorting, joining and writing segments goes on in the
    background, and leaves no trace if the process is killed over it. A copy (or pickle) is another
    memory with the same sessions, without a folder.

    Args:
        max_tokens (`int`): The most tokens that are remembered.
        folder (`SessionFolder`, *optional*): Where they are kept as well; what is there already
            is remembered.
        seal_tokens (`int`, *optional*): Tokens after which the tail is sealed.

    Attributes:
        path (`Path`, *optional*): Of the folder.
        view (`View`): What there is now. It is replaced, never changed.
        tokens (`int`): Tokens of the sessions that are remembered.
        closed (`bool`): Whether no more is remembered.

    Raises:
        DatastoreError: If there is not enough memory for what is in the folder.
    """

    def __init__(
        self,
        max_tokens: int,
        folder: SessionFolder | None = None,
        seal_tokens: int | None = None,
    ) -> None:
        self.max_tokens = max_tokens
        self.path = None if folder is None else folder.path
        self._folder = folder
        # The first guards all that is here, for microseconds (a search of 10,000 prompts: for a
        # millisecond); the second what is on the disk. Who needs both takes the second first.
        self._lock = threading.RLock()
        self._disk_lock = threading.Lock()
        self._background: dict[Callable[[], None], threading.Thread] = {}
        self.closed = False
        self._segments: list[Segment] = []
        self._tail = Tail()
        self._prompts = SimilarPrompts()
        self._oldest = 0
        self.tokens = 0
        self._unsealed = 0
        self._seal_tokens = self._seal_at = seal_tokens or SEAL_TOKENS
        self._largest_id = -1
        self._keeps = True
        if folder is not None:
            try:
                self._fill(folder)
            except MemoryError:
                folder.close()
                raise DatastoreError(
                    f"{folder.path} cannot be read: there is not enough memory for its sessions"
                ) from None
        self._publish()

    def __len__(self) -> int:
        with self._lock:
            return self._tail.end - self._oldest

    def add(self, prompt: np.ndarray, output: np.ndarray) -> None:
        """Remembers a session: integer arrays of shape `(n,)`, not both empty."""
        with self._lock:
            self._check_open()
            if not self._has_room(prompt, output):
                return
            if self._folder is not None:
                self._keep(self._folder, prompt, output)
            self._append(prompt, output)
            self._publish()
            self._schedule()

    def sessions(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """The prompts and outputs of all sessions, the oldest first."""
        with self._lock:
            numbers = range(self._oldest, self._tail.end)
            return [self._holder(number).document(number) for number in numbers]

    def similar_outputs(self, prompt: np.ndarray, count: int) -> list[np.ndarray]:
        """The outputs of the `count` sessions with the most similar prompts, the best one last."""
        with self._lock:
            numbers = self._prompts.search(prompt, self._oldest, count)
            return [self._holder(number).document(number)[1] for number in numbers]

    def clear(self) -> None:
        """Forgets all sessions, at once and on the disk."""
        with self._disk_lock, self._lock:
            self._check_open()
            self._oldest = self._tail.end
            self.tokens = self._unsealed = 0
            self._segments = []
            self._tail = Tail(self._oldest)
            self._prompts = SimilarPrompts(self._oldest)
            self._largest_id = -1
            self._publish()
            if self._folder is not None:
                self._folder.clear()

    def wait(self) -> None:
        """Waits until nothing goes on in the background."""
        while True:
            with self._lock:
                threads = list(self._background.values())
            if not threads:
                return
            for thread in threads:
                thread.join()

    def close(self) -> None:
        """Ends the work in the background and lets other processes open the folder."""
        with self._lock:
            self.closed = True
        self.wait()
        with self._disk_lock:
            if self._folder is not None:
                self._folder.close()
                self._folder = None

    def __getstate__(self) -> dict[str, Any]:
        # Copies, and of one type: sorted documents are of as short a type as holds them.
        sessions = [(prompt.astype(int), output.astype(int)) for prompt, output in self.sessions()]
        return {"options": (self.max_tokens, None, self._seal_tokens), "sessions": sessions}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Memory.__init__(self, *state["options"])
        for prompt, output in state["sessions"]:
            self._append(prompt, output)
        self._publish()

    def _fill(self, folder: SessionFolder) -> None:
        self._segments = folder.segments
        if self._segments:
            self._tail = Tail(self._segments[-1].end)
            self.tokens = sum(len(each.text.tokens) - len(each.ends) for each in self._segments)
            self._largest_id = max(each.text.vocab_size for each in self._segments) - 1
            for segment in self._segments:
                for number in range(segment.first, segment.end):
                    self._prompts.add(segment.document(number)[0])
        for prompt, output in folder.calls:
            if self._has_room(prompt, output):
                self._append(prompt, output)
        # Held on to there, files would stay on the disk that are deleted.
        folder.segments, folder.calls = [], []
        self._forget()

    def _keep(self, folder: SessionFolder, prompt: np.ndarray, output: np.ndarray) -> None:
        """Writes a session to the disk; where that fails, a call of `generate` does not."""
        try:
            folder.append(prompt, output)
            self._keeps = True
        except OSError as error:
            if self._keeps:
                logger.warning("%s; until that is mended, sessions are only in memory", error)
            self._keeps = False

    def _has_room(self, prompt: np.ndarray, output: np.ndarray) -> bool:
        """Whether a session can be remembered: a longer one would push out all others."""
        return len(prompt) + len(output) <= min(self.max_tokens, LONGEST_CALL)

    def _append(self, prompt: np.ndarray, output: np.ndarray) -> None:
        self._tail.add(prompt, output)
        self._prompts.add(prompt)
        self.tokens += len(prompt) + len(output)
        self._unsealed += len(prompt) + len(output)
        self._largest_id = max(
            self._largest_id, int(prompt.max(initial=-1)), int(output.max(initial=-1))
        )
        self._forget()

    def _holder(self, number: int) -> Segment | Tail:
        return next((each for each in self._segments if number < each.end), self._tail)

    def _forget(self) -> None:
        """Forgets the oldest sessions that are too many."""
        before = self._oldest
        while self.tokens > self.max_tokens:
            begin, end = self._holder(self._oldest).place(self._oldest)
            self.tokens -= end - begin
            self._oldest += 1
        if self._oldest > before:
            self._segments = [each for each in self._segments if each.end > self._oldest]
            self._tail = self._tail.since(self._oldest)
            self._prompts.forget(self._oldest)

    def _publish(self) -> None:
        self.view = View(
            tuple(segment.text for segment in self._segments), self._tail.linked(), self._largest_id
        )

    def _check_open(self) -> None:
        if self._folder is not None and not self._folder.is_ours:
            # Of the process that this one was forked from, as are the threads: this is a copy now.
            self._folder, self._background = None, {}
        if self.closed:
            raise RuntimeError("this RetrievalCache is closed")

    def _schedule(self) -> None:
        """Begins what is due in the background. The tail does not wait for a long joining."""
        if self._unsealed >= self._seal_at:
            self._start(self._seal)
        if self._due() is not None:
            self._start(self._join)

    def _start(self, job: Callable[[], None]) -> None:
        if job not in self._background and not self.closed:
            self._background[job] = threading.Thread(target=self._run, args=(job,), daemon=True)
            self._background[job].start()

    def _run(self, job: Callable[[], None]) -> None:
        failed: Exception | None = None
        try:
            job()
        except Exception as error:
            failed = error
            logger.warning("sessions cannot be indexed: %r; drafting takes longer", error)
        with self._lock:
            del self._background[job]
            if failed:  # it is tried again when the tail has grown as much again
                self._seal_at = self._unsealed + self._seal_tokens
            else:
                self._schedule()

    def _seal(self) -> None:
        """Seals the tail: sorts it into a segment."""
        with self._lock:
            first_log = self._folder.begin_log() if self._folder is not None else None
            sealed = self._unsealed
            first, tokens, ends, prompt_lengths = self._tail.arrays()
        segment = Segment.build(first, tokens, ends, prompt_lengths) if len(ends) else None
        self._replace(segment, first_log)
        with self._lock:
            self._unsealed = max(self._unsealed - sealed, 0)
            self._seal_at = self._seal_tokens

    def _due(self) -> slice | None:
        """Which segments should be made one, without what is forgotten."""
        if not self._segments:
            return None
        oldest = self._segments[0]
        if self._oldest > oldest.first:
            kept = len(oldest.text.tokens) - oldest.place(self._oldest)[0]
            if kept < _FRACTION_KEPT * len(oldest.text.tokens):
                return slice(0, 1)
        return due_to_join([len(segment.text.tokens) for segment in self._segments])

    def _join(self) -> None:
        """Joins several segments into one."""
        with self._lock:
            due, oldest = self._due(), self._oldest
            segments = self._segments[due] if due is not None else []
        if segments:
            self._replace(joined(segments, oldest))

    def _replace(self, new: Segment | None, first_log: int | None = None) -> None:
        """Puts a new segment in the place of what it was made of."""
        with self._disk_lock:
            if self._folder is not None:
                new = self._folder.save(new) if new is not None else None
                with self._lock:
                    segments = self._with(new)
                self._folder.commit(segments, first_log)
            with self._lock:
                self._segments = self._with(new)
                if new is not None:
                    self._tail = self._tail.since(new.end)
                self._publish()

    def _with(self, new: Segment | None) -> list[Segment]:
        if new is None or new.end <= self._oldest:  # all of it was forgotten meanwhile
            return list(self._segments)
        others = [each for each in self._segments if each.end <= new.first or each.first >= new.end]
        return sorted([*others, new], key=lambda each: each.first)
