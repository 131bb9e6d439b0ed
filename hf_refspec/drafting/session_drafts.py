"""Drafts from sessions, which are finished calls, for many threads and many processes."""

from __future__ import annotations

import copy
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from ..index.llma import LONGEST_MATCH, copy_tree
from ..index.similar_prompts import similar_prompts
from ..index.token_buffer import LinkedText, TokenBuffer
from ..messages import check_count, check_ids
from ..store.files import DatastoreError
from ..store.sessions import LONGEST_SESSION, SessionDatabase, Sessions
from ..text_config import text_tokenizer
from .contract import Call, LookUp, Observation
from .token_ids import Reference, to_ids
from .tree import DraftTree, merged

logger = logging.getLogger("hf_refspec")

# The weights of estimates that hold for copies from the present text: continuations in any session
# are less likely, those in the outputs of similar sessions as likely.
_TRUST = 0.3
_TRUST_SIMILAR = 1.0
# A bound on the time in which a call begins: all sessions are ranked, and those are copied.
_MOST_SIMILAR = 256
# Positions in the text are int32, and a boundary follows each session.
MOST_TOKENS = 1 << 29
# The text is rebuilt when a larger fraction of it is forgotten: the smaller, the more often.
_FORGOTTEN = 1 / 8
# Guards all memories while they change. A fork waits for it, so that no process is born with a lock
# that a thread of its parent holds.
_lock = threading.Lock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release
    )


class SessionDrafts(LookUp):
    """Remembers sessions (finished calls of `generate`) and drafts from them.

    Every call that used it becomes a session, its prompt and output; the oldest ones are forgotten.
    (A call that ends while a fresh installation compiles its kernels is not remembered.) It
    searches all sessions for the last tokens, and copies from the outputs of the `top_k` sessions
    whose prompts have most tokens in common with the present one, as LLMA does ("Inference with
    Reference", arXiv 2304.04487, section 2.3), but never from the present call:
    `ReferenceCopy() | SessionDrafts()` drafts from both.

    A drafter serves one call at a time; `fork()` returns another one that shares the sessions, for
    another thread. `add`, `clear` and `len` are safe in any thread. A copy (or pickle) is another
    cache with the same sessions, without a `path`.

    Args:
        tokenizer (`PreTrainedTokenizerBase`, *optional*):
            The target model's, for `add` with strings, and to refuse a `path` with the sessions of
            another tokenizer.
        max_tokens (`int`, *optional*, defaults to 10,000,000):
            The most tokens that are remembered, 2**29 at most; a token takes 8 to 16 bytes of
            memory, a session 30 more. A longer call (or one of more than 16 million tokens) is not
            remembered.
        top_k (`int`, *optional*, defaults to 4):
            How many sessions with similar prompts are copied from, 256 at most; 0 for none.
        path (`str` or `Path`, *optional*):
            A folder that keeps the sessions, so that they outlive the process, even one that is
            killed. Several processes may share it: a call drafts from the calls that all of them
            had finished when it began, and the smallest `max_tokens` counts. If it cannot be
            written, as on a full disk, a warning says so, and calls are remembered in memory only.

    Raises:
        ValueError: If a number is too small or too large. `begin` raises it if a remembered token
            is outside of the target's vocabulary.
        DatastoreError: If `path` is damaged, of another tokenizer or something else, or cannot be
            used.
        OSError: If there is nothing at `path` and it cannot be made.
    """

    longest_match = LONGEST_MATCH
    _call: _Call | None = None
    _of_a_call = (*LookUp._of_a_call, "_call")

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None = None,
        max_tokens: int = 10_000_000,
        top_k: int = 4,
        path: str | os.PathLike | None = None,
    ) -> None:
        check_count("max_tokens", max_tokens, most=MOST_TOKENS)
        check_count("top_k", top_k, least=0, most=_MOST_SIMILAR)
        self.tokenizer = tokenizer = text_tokenizer(tokenizer)
        self.top_k = top_k
        database = None if path is None else SessionDatabase(Path(path), max_tokens, tokenizer)
        self._memory = Memory(max_tokens, database)

    def __len__(self) -> int:
        return len(self._memory)

    def __bool__(self) -> bool:
        return True  # not an empty container

    def check(self, vocab_size: int, processors: Sequence[Any] | None = None) -> None:
        path = self._memory.path
        error = ValueError if path is None else DatastoreError
        remedy = "was it made with another tokenizer?"
        largest_id = self._memory.view.largest_id
        check_ids(path or "the cache", largest_id, vocab_size, remedy, error)

    def begin(self, prompt_ids: np.ndarray, vocab_size: int) -> None:
        self._call = None
        view = self._memory.refresh()
        self.check(vocab_size)
        super().begin(prompt_ids, vocab_size)
        similar = TokenBuffer()
        for output in view.similar_outputs(prompt_ids, self.top_k) if self.top_k > 0 else ():
            similar.add_text(output)
        self._call = _Call(prompt_ids, view, similar.text)

    def look_up(self, context: np.ndarray, budget: int, behind_path: bool, call: Call) -> DraftTree:
        if self._call is None:
            return DraftTree.empty()
        trees = []
        for text, weight in ((self._call.view.text, _TRUST), (self._call.similar, _TRUST_SIMILAR)):
            (tokens, parents, probs), _ = copy_tree(text, context, budget, 1, budget, False, -1)
            trees.append(DraftTree(tokens, parents, probs * np.float32(weight)))
        return merged(trees, budget)

    def observe(self, observation: Observation) -> None:
        super().observe(observation)
        if self._call is not None:
            self._call.output.append(observation.tokens)

    def source_texts(self) -> list[tuple[str, Sequence[Any]]]:
        if self._call is None:
            return []
        view = self._call.view
        forgotten = int(view.ends[view.oldest - 1]) + 1 if view.oldest else 0
        return [("sessions", [view.text.tokens[forgotten:]])]

    def end(self) -> None:
        call = self._call
        self._call = None
        if call is not None and call.output:
            self._memory.add(call.prompt, np.concatenate(call.output))

    def add(self, prompt: Reference, output: Reference) -> None:
        """Remembers a call that was finished elsewhere, as a session.

        Args:
            prompt (`str`, list of ids, 1-D tensor or array): A string needs the `tokenizer`.
            output (`str`, list of ids, 1-D tensor or array): The text after the prompt.

        Raises:
            ValueError: If one is empty, has a negative id or is a string without a `tokenizer`.
        """
        prompt_ids = to_ids("prompt", prompt, self.tokenizer)
        output_ids = to_ids("output", output, self.tokenizer)
        self._memory.add(prompt_ids, output_ids)

    def clear(self) -> None:
        """Forgets all sessions."""
        self._memory.clear()

    def fork(self) -> SessionDrafts:
        """Another drafter with the same memory, for another thread or row of a batch."""
        return copy.copy(self)


@dataclass(frozen=True)
class _Call:
    """The present call."""

    prompt: np.ndarray
    view: View  # when it began: later sessions were not checked against its vocabulary
    similar: LinkedText  # the outputs of similar sessions
    output: list[np.ndarray] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """The sessions at one moment, numbered in order of arrival; it never changes.

    Attributes:
        text ([`LinkedText`]): All of them, with a boundary after each.
        ids (`np.ndarray`, int64 of shape `(d,)`): Their ids in the database.
        ends (`np.ndarray`, int32 of shape `(d,)`): The place of the boundary after each one.
        prompt_lengths (`np.ndarray`, int32 of shape `(d,)`): The length of each one's prompt.
        oldest (`int`): The first that is remembered; the text may still have earlier ones.
    """

    text: LinkedText
    ids: np.ndarray
    ends: np.ndarray
    prompt_lengths: np.ndarray
    oldest: int = 0

    def __len__(self) -> int:
        return len(self.ends) - self.oldest

    @property
    def largest_id(self) -> int:
        """The largest token; -1 without any."""
        return int(np.flatnonzero(self.text.latest >= 0).max(initial=-1))

    def session(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """The prompt and the output of a session."""
        begin = int(self.ends[number - 1]) + 1 if number else 0
        split = begin + int(self.prompt_lengths[number])
        return self.text.tokens[begin:split], self.text.tokens[split : self.ends[number]]

    def sessions(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """The prompts and outputs of all sessions, the oldest first."""
        return [self.session(number) for number in range(self.oldest, len(self.ends))]

    def similar_outputs(self, prompt: np.ndarray, count: int) -> list[np.ndarray]:
        """The outputs of the `count` sessions with the most similar prompts, the best one last."""
        vocab_size = self.largest_id + 1
        prompt = prompt.astype(np.int64)
        numbers = similar_prompts(
            self.text.tokens, self.ends, self.prompt_lengths, self.oldest, prompt, count, vocab_size
        )
        return [self.session(number)[1] for number in numbers.tolist()]


class Memory:
    """Sessions in one linked text; the oldest are forgotten first.

    With a database they are its newest rows, and the sessions that could not be written there.
    Drafts may see a forgotten session until the text is rebuilt, once an eighth of it is forgotten.

    Attributes:
        view ([`View`]): The present sessions; it is replaced, never changed.
    """

    view: View
    _text: TokenBuffer

    def __init__(self, max_tokens: int, database: SessionDatabase | None = None) -> None:
        self.max_tokens = max_tokens
        self.path: Path | None = None if database is None else database.folder
        self._database = database
        self._keeps = True  # true if the last use of the database succeeded
        self._last_id = 0  # the newest session that was read from the database
        self._forget_all()
        if database is not None:
            with _lock:
                self._read(database)

    def __len__(self) -> int:
        return len(self.view)

    def add(self, prompt: np.ndarray, output: np.ndarray) -> None:
        """Remembers a session: integer arrays of shape `(n,)`, not both empty."""
        with _lock:
            length = len(prompt) + len(output)
            if length > min(self.max_tokens, LONGEST_SESSION):  # it would replace all others
                return
            if self._database is not None:
                with self._warned(), self._database.opened():
                    oldest = int(self.view.ids[self.view.oldest]) if len(self) else 0
                    self._database.append(prompt, output, oldest)
                    self._read(self._database)
                    self._keeps = True
            if self._database is None or not self._keeps:
                tokens = np.concatenate((prompt, output, [-1])).astype(np.int32)
                ids = np.array([self._last_id + 1])
                self._append(Sessions(ids, tokens, np.array([length]), np.array([len(prompt)])))

    def refresh(self) -> View:
        """The present sessions, including new ones of other processes: of many the first batch."""
        if self._database is not None:
            with _lock, self._warned():
                self._read(self._database, batches=1)
        return self.view

    def clear(self) -> None:
        """Forgets all sessions, in the database as well; raises a DatastoreError if it fails."""
        with _lock:
            self._forget_all()
            if self._database is not None:
                self._database.clear()

    def __getstate__(self) -> dict[str, Any]:
        return {"max_tokens": self.max_tokens, "sessions": self.view.sessions()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Memory.__init__(self, state["max_tokens"])
        for prompt, output in state["sessions"]:
            self.add(prompt, output)

    @contextmanager
    def _warned(self) -> Iterator[None]:
        """Warns, once, if the database fails; a call of `generate` continues."""
        try:
            yield
        except DatastoreError as error:
            if self._keeps:
                logger.warning("%s; until that is mended, sessions are kept in memory only", error)
            self._keeps = False

    def _read(self, database: SessionDatabase, batches: int | None = None) -> None:
        """Forgets sessions that the database no longer has; reads new ones, in a few `batches`."""
        with database.opened():
            oldest = database.oldest(default=self._last_id + 1)
            self._forget(self.view, int(np.searchsorted(self.view.ids, oldest)))
            for sessions in islice(database.read(self._last_id), batches):
                self._append(sessions)
                self._last_id = int(sessions.ids[-1])

    def _append(self, sessions: Sessions) -> None:
        old = self.view
        ends = sessions.ends + len(self._text)
        self._text.extend(sessions.tokens)
        new = View(
            self._text.snapshot(),
            np.concatenate((old.ids, sessions.ids)),
            np.concatenate((old.ends, ends), dtype=np.int32),
            np.concatenate((old.prompt_lengths, sessions.prompt_lengths), dtype=np.int32),
        )
        self._forget(new, old.oldest)

    def _forget(self, view: View, oldest: int) -> None:
        """Forgets a view's sessions before the number `oldest`, and further ones, the oldest first,
        until `max_tokens` holds; rebuilds the text without them once they are many."""
        begins = np.concatenate(([0], view.ends + 1))
        left = len(self._text) - begins - np.arange(len(view.ends), -1, -1)  # without boundaries
        oldest = max(oldest, view.oldest, int((left <= self.max_tokens).argmax()))
        begin = int(begins[oldest])
        if begin > _FORGOTTEN * len(self._text):
            self._text = TokenBuffer()
            self._text.extend(view.text.tokens[begin:])
            self.view = View(
                self._text.snapshot(),
                view.ids[oldest:],
                view.ends[oldest:] - begin,
                view.prompt_lengths[oldest:],
            )
        else:
            self.view = replace(view, oldest=oldest)

    def _forget_all(self) -> None:
        self._text = TokenBuffer()
        none = np.empty(0, np.int32)
        self.view = View(self._text.snapshot(), np.empty(0, np.int64), none, none)
