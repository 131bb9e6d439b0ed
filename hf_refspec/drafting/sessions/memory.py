"""The sessions of a `RetrievalCache`, for many threads and, with a database, many processes."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from ...index.segments import (
    LARGEST_SEGMENT,
    Documents,
    Segment,
    Tail,
    due_to_join,
    joined,
)
from ...index.similar_prompts import similar_prompts
from ...store.files import DatastoreError
from ...store.sessions import LONGEST_SESSION, SessionDatabase, Sessions

logger = logging.getLogger("hf_refspec")

# The length at which the tail is sealed: a longer one takes longer to search than another segment.
SEAL_TOKENS = 1 << 13
# The oldest segment is rewritten when less than this fraction of it is still remembered.
_FRACTION_KEPT = 7 / 8
# The end of a call waits for sorting: a fifth of a second for this many tokens. Longer segments are
# joined only where there would be more than `_MOST_SEGMENTS` otherwise.
_JOINED_TOKENS = 1 << 20
_MOST_SEGMENTS = 10


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """The sessions at one moment, numbered in order of arrival; it never changes."""

    segments: tuple[Segment, ...]  # all but the newest sessions
    tail: Documents  # the newest
    oldest: int  # the first that is remembered; earlier ones may still be in a segment
    largest_id: int  # of all tokens; -1 if there are none

    def __len__(self) -> int:
        return self.tail.end - self.oldest

    def session(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """The prompt and the output of a session."""
        parts: tuple[Documents, ...] = self.segments
        return next((each for each in parts if number < each.end), self.tail).document(number)

    def sessions(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """The prompts and outputs of all sessions, the oldest first."""
        return [self.session(number) for number in range(self.oldest, self.tail.end)]

    def similar_outputs(self, prompt: np.ndarray, count: int) -> list[np.ndarray]:
        """The outputs of the `count` sessions with the most similar prompts, the best one last."""
        parts = (*self.segments, self.tail)
        numbers = similar_prompts(parts, prompt, self.oldest, count, self.largest_id + 1)
        return [self.session(number)[1] for number in numbers]


class Memory:
    """Sessions, numbered in order of arrival; the oldest are forgotten first.

    With a database they are its newest rows, and those that could not be written there. Drafts may
    see a forgotten session until an eighth of its segment is forgotten and the segment is
    rewritten. A copy (or pickle) is another memory with the same sessions, without a database.
    """

    view: View  # the present sessions; it is replaced, never changed
    tokens: int  # of the present sessions
    _segments: list[Segment]
    _tail: Tail
    _ids: array[int]  # in the database, of each session that is remembered

    def __init__(self, max_tokens: int, database: SessionDatabase | None = None) -> None:
        self.max_tokens = max_tokens
        self.path: Path | None = None if database is None else database.folder
        self.closed = False  # whether no more is remembered
        self._database = database
        self._keeps = True  # whether the last use of the database succeeded
        self._lock = threading.Lock()
        self._last_id = 0  # of the newest session that was read from the database
        self._forget_all(0)
        if database is not None:
            self._read(database)
        self._publish()
        with _forking:
            _memories.add(self)

    def __len__(self) -> int:
        return len(self.view)

    def add(self, prompt: np.ndarray, output: np.ndarray) -> None:
        """Remembers a session: integer arrays of shape `(n,)`, not both empty."""
        with self._lock:
            if self.closed:
                raise RuntimeError("this RetrievalCache is closed")
            length = len(prompt) + len(output)
            if length > min(self.max_tokens, LONGEST_SESSION):  # it would push out all others
                return
            with self._warned():
                if self._database is not None:
                    oldest = self._ids[0] if self._ids else 0
                    self._database.append(prompt, output, oldest)
                    self._read(self._database)
                self._keeps = True
            if self._database is None or not self._keeps:
                tokens = np.concatenate((prompt, output, [-1])).astype(np.int32)
                ids, ends, prompt_lengths = (
                    np.array([each]) for each in (self._last_id + 1, length, len(prompt))
                )
                self._append(Sessions(ids, tokens, ends, prompt_lengths))
            self._publish()

    def refresh(self) -> View:
        """The present sessions, with those of other processes since (or the first batch, if there
        are many)."""
        with self._lock:
            if self._database is not None and not self.closed:
                with self._warned():
                    self._read(self._database, batches=1)
                self._publish()
            return self.view

    def clear(self) -> None:
        """Forgets all sessions, in the database as well (or raises a DatastoreError)."""
        with self._lock:
            if self.closed:
                raise RuntimeError("this RetrievalCache is closed")
            self._forget_all(self._tail.end)
            self._publish()
            if self._database is not None:
                self._database.clear()

    def close(self) -> None:
        """Closes the database."""
        with self._lock:
            self.closed = True
            if self._database is not None:
                self._database.close()

    def __getstate__(self) -> dict[str, Any]:
        # Copies of one type: sorted documents have the shortest type that holds them.
        sessions = [(p.astype(int), o.astype(int)) for p, o in self.view.sessions()]
        return {"max_tokens": self.max_tokens, "sessions": sessions}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Memory.__init__(self, state["max_tokens"])
        for prompt, output in state["sessions"]:
            self.add(prompt, output)

    @contextmanager
    def _warned(self) -> Iterator[None]:
        """Warns, once, where the database fails; a call of `generate` goes on."""
        try:
            yield
        except DatastoreError as error:
            if self._keeps:
                logger.warning("%s; until that is mended, sessions are only in memory", error)
            self._keeps = False

    def _read(self, database: SessionDatabase, batches: int | None = None) -> None:
        """Forgets sessions that the database no longer has, and reads new ones, in at most
        `batches` batches."""
        oldest = database.oldest(default=self._last_id + 1)
        self._forget(self._oldest + bisect_left(self._ids, oldest))
        for sessions in islice(database.read(self._last_id), batches):
            self._append(sessions)
            self._last_id = int(sessions.ids[-1])

    def _append(self, sessions: Sessions) -> None:
        ids, tokens, ends, prompt_lengths = sessions
        self._tail.extend(tokens, ends, prompt_lengths)
        self._ids.extend(ids.tolist())
        self.tokens += len(tokens) - len(ends)
        self._forget(self._oldest)
        if len(self._tail.tokens) >= SEAL_TOKENS:
            self._segments.append(Segment.build(*self._tail.arrays()))
            self._tail = Tail(self._tail.end)
        self._join()

    def _forget(self, oldest: int) -> None:
        """Forgets the sessions before the number `oldest`, and then the oldest until `max_tokens`
        holds."""
        before = self._oldest
        while self.tokens > self.max_tokens or self._oldest < oldest:
            parts = (each for each in self._segments if self._oldest < each.end)
            begin, end = next(parts, self._tail).place(self._oldest)
            self.tokens -= end - begin
            self._oldest += 1
        if self._oldest > before:
            del self._ids[: self._oldest - before]
            self._segments = [each for each in self._segments if each.end > self._oldest]
            self._tail = self._tail.since(self._oldest)

    def _forget_all(self, oldest: int) -> None:
        self._oldest, self.tokens = oldest, 0
        self._segments, self._tail, self._ids = [], Tail(oldest), array("q")

    def _join(self) -> None:
        """Joins segments that are due, and rewrites the oldest without forgotten sessions."""
        if self._segments:
            oldest = self._segments[0]
            kept = len(oldest.tokens) - oldest.place(max(self._oldest, oldest.first))[0]
            if kept < _FRACTION_KEPT * len(oldest.tokens):
                self._segments[0] = oldest.since(self._oldest)
        largest = max(_JOINED_TOKENS, self.max_tokens // _MOST_SEGMENTS)
        sizes = [len(segment.tokens) for segment in self._segments]
        while (due := due_to_join(sizes, min(largest, LARGEST_SEGMENT))) is not None:
            self._segments[due] = [joined(self._segments[due], self._oldest)]
            sizes = [len(segment.tokens) for segment in self._segments]

    def _publish(self) -> None:
        tail = self._tail.snapshot()
        largest_ids = [segment.text.vocab_size - 1 for segment in self._segments]
        largest_id = max([int(tail.tokens.max(initial=-1)), *largest_ids])
        self.view = View(tuple(self._segments), tail, self._oldest, largest_id)


# A forked process must not inherit a connection of SQLite, nor a lock that another thread holds:
# a fork waits for each memory and closes its database, which is opened again when needed.
_memories = weakref.WeakSet[Memory]()
_held: list[Memory] = []
_forking = threading.Lock()  # guards these two


def _hold_all() -> None:
    _forking.acquire()
    for memory in sorted(_memories, key=id):
        memory._lock.acquire()
        _held.append(memory)
        if memory._database is not None:
            memory._database.close()


def _release_all() -> None:
    while _held:
        _held.pop()._lock.release()
    _forking.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_hold_all, after_in_parent=_release_all, after_in_child=_release_all)
