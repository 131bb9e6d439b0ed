"""Drafts from the other rows of a call that have the same prompt."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from ..index.copy_tree import LONGEST_MATCH, copy_tree
from ..index.token_buffer import SideBySide
from .drafter import last_tokens
from .observation import Observation
from .source import NO_PATH, Source
from .tree import DraftTree


class _Group:
    """The rows of one prompt, from the first that begins to the last that ends."""

    def __init__(self) -> None:
        self.texts = SideBySide()  # the end of the prompt and the output of each
        self.going = 0
        self.lock = threading.Lock()  # kernels read texts while other threads run


class _Groups(dict[bytes, _Group]):
    """Groups by their prompts. Copies and pickles of a drafter take none along."""

    lock = threading.Lock()  # for joining and leaving

    def __deepcopy__(self, memo: dict[int, Any]) -> _Groups:
        return _Groups()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Groups, ()


class SiblingCopy(Source):
    """Copies what followed the last tokens in other rows with the same prompt, as these grow.

    For `num_return_sequences`, and for rollouts, where several rows answer one prompt: rows whose
    prompts are equal are recognised, and share one index. Rows of other prompts, and a row that has
    none beside it, draft nothing. Forks share their groups, so that requests of `generate_batch`
    and texts of a [`RunningBatch`] draft from one another as well.

    A row's own text is among it; `ReferenceCopy() | SiblingCopy()` also drafts from the prompt.
    """

    _group: _Group | None = None

    def __init__(self) -> None:
        self._groups = _Groups()

    def begin(self, prompt_ids: np.ndarray, vocab_size: int) -> None:
        self.end()
        self._context = prompt_ids[-LONGEST_MATCH:].astype(np.int32)
        self._prompt = prompt_ids.tobytes()
        with self._groups.lock:
            self._group = self._groups.setdefault(self._prompt, _Group())
            self._group.going += 1
        with self._group.lock:
            self._number = self._group.texts.add(self._context)

    def draft(self, budget: int) -> DraftTree:
        return self.continue_path(NO_PATH, budget)

    def continue_path(self, path: np.ndarray, budget: int) -> DraftTree:
        group = self._group
        if budget == 0 or group is None or len(group.texts) == 1 or len(self._context) == 0:
            return DraftTree.empty()
        context = last_tokens(self._context, path, LONGEST_MATCH)
        chain = self.call.chain and len(path) == 0
        with group.lock:
            tree, _ = copy_tree(group.texts.text, context, budget, 1, budget, chain, -1)
        return DraftTree(*tree)

    def observe(self, observation: Observation) -> None:
        if self._group is not None:
            with self._group.lock:
                self._group.texts.extend(self._number, observation.tokens)
            self._context = last_tokens(self._context, observation.tokens, LONGEST_MATCH)

    def fork(self) -> SiblingCopy:
        fork = type(self)()
        fork._groups, fork.calibration = self._groups, self.calibration
        return fork

    def end(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            with self._groups.lock:
                group.going -= 1
                if group.going == 0:
                    del self._groups[self._prompt]
