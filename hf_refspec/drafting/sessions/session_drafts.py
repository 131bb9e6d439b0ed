"""Drafts from sessions, finished calls: cache-assisted generation, and conversations."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from ...check_count import check_count
from ...index.copy_tree import LONGEST_MATCH, copy_tree
from ...index.token_buffer import LinkedText, TokenBuffer
from ...store.files import DatastoreError
from ...store.sessions import SessionDatabase
from ...text_tokenizer import text_tokenizer
from ..contract import Call, LookUp, Observation
from ..token_ids import Reference, to_ids
from ..tree import DraftTree, merged
from .memory import MOST_TOKENS, Memory, View

# The weights of estimates that hold for copies from the present text: continuations in any session
# are less likely, those in the outputs of similar sessions as likely.
_TRUST = 0.3
_TRUST_SIMILAR = 1.0
# A bound on the time in which a call begins: all sessions are ranked, and those are copied.
_MOST_SIMILAR = 256


class SessionDrafts(LookUp):
    """Remembers sessions (finished calls of `generate`) and drafts from them.

    Every call that used it becomes a session, its prompt and output; the oldest ones are forgotten.
    (A call that ends while a fresh installation compiles its kernels is not remembered.) It
    searches all sessions for the last tokens, and copies from the outputs of the `top_k` sessions
    whose prompts have most tokens in common with the present one, as LLMA does ("Inference with
    Reference", arXiv 2304.04487, section 2.3).

    It does not draft from the present call; `ReferenceCopy() | SessionDrafts()` drafts from both.

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
    _prompt: np.ndarray | None
    _view: View | None
    _references: LinkedText | None
    _of_a_call = (*LookUp._of_a_call, "_prompt", "_view", "_references", "_output")

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
        self._forget_call()

    def __len__(self) -> int:
        return len(self._memory)

    def __bool__(self) -> bool:
        return True  # not an empty container

    def check(self, vocab_size: int, processors: Sequence[Any] | None = None) -> None:
        largest_id = self._memory.view.largest_id
        path = self._memory.path
        if largest_id >= vocab_size:
            raise (ValueError if path is None else DatastoreError)(
                f"{path or 'the cache'} remembers the id {largest_id}, outside of the target "
                f"model's vocabulary of {vocab_size}; was it made with another tokenizer?"
            )

    def begin(self, prompt_ids: np.ndarray, vocab_size: int) -> None:
        self._forget_call()
        view = self._memory.refresh()
        self.check(vocab_size)
        super().begin(prompt_ids, vocab_size)
        # Sessions that are added during the call are not checked against the vocabulary.
        self._prompt = prompt_ids
        self._view = view
        outputs = view.similar_outputs(prompt_ids, self.top_k) if self.top_k > 0 else []
        if outputs:
            references = TokenBuffer()
            for output in outputs:
                references.add_text(output)
            self._references = references.text

    def look_up(self, context: np.ndarray, budget: int, behind_path: bool, call: Call) -> DraftTree:
        if self._view is None:
            return DraftTree.empty()
        trees = []
        for text, weight in ((self._view.text, _TRUST), (self._references, _TRUST_SIMILAR)):
            if text is not None:
                (tokens, parents, probs), _ = copy_tree(text, context, budget, 1, budget, False, -1)
                trees.append(DraftTree(tokens, parents, probs * np.float32(weight)))
        return merged(trees, budget)

    def observe(self, observation: Observation) -> None:
        super().observe(observation)
        self._output.append(observation.tokens)

    def source_texts(self) -> list[tuple[str, Sequence[Any]]]:
        if (view := self._view) is None:
            return []
        forgotten = int(view.ends[view.oldest - 1]) + 1 if view.oldest else 0
        return [("sessions", [view.text.tokens[forgotten:]])]

    def end(self) -> None:
        prompt = self._prompt
        output = self._output
        self._forget_call()
        if prompt is not None and output:
            self._memory.add(prompt, np.concatenate(output))

    def add(self, prompt: Reference, output: Reference) -> None:
        """Remembers a call that was finished elsewhere, as a session.

        Args:
            prompt, output (`str`, list of ids, 1-D tensor or array): The call's; strings need the
                `tokenizer`.

        Raises:
            TypeError: If one of them is something else.
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

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._forget_call()

    def _forget_call(self) -> None:
        self._prompt = self._view = self._references = None
        self._output: list[np.ndarray] = []
        self._context = LookUp._context
