"""Drafts from the other rows of a call that have the same prompt."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from ..index.copy_tree import LONGEST_MATCH, copy_tree
from ..index.token_buffer import SideBySide
from .observation import Observation
from .source import LookUp
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


class SiblingCopy(LookUp):
    """Copies what followed the last tokens in other rows with the same prompt, as these grow.

    For `num_return_sequences`, and for rollouts, where several rows answer one prompt: rows whose
    prompts are equal are recognised, and share one index. Rows of other prompts, and a row that has
    none beside it, draft nothing. Forks share their groups, so that requests of `generate_batch`
    and texts of a [`RunningBatch`] draft from one another as well.

    A row's own text is among it; `ReferenceCopy() | SiblingCopy()` also drafts from the prompt.
    """

    longest_match = LONGEST_MATCH
    _group: _Group | None = None

    def __init__(self) -> None:
        self._groups = _Groups()

    def begin(self, prompt_ids: np.ndarray, vocab_size: int) -> None:
        self.end()
        super().begin(prompt_ids, vocab_size)
        self._prompt = prompt_ids.tobytes()
        with self._groups.lock:
            self._group = self._groups.setdefault(self._prompt, _Group())
            self._group.going += 1
        with self._group.lock:
            self._number = self._group.texts.add(self._context)

    def look_up(self, context: np.ndarray, budget: int, behind_path: bool) -> DraftTree:
        group, chain = self._group, self.call.chain and not behind_path
        if group is None or len(group.texts) == 1:
            return DraftTree.empty()
        with group.lock:
            tree, _ = copy_tree(group.texts.text, context, budget, 1, budget, chain, -1)
        return DraftTree(*tree)

    def observe(self, observation: Observation) -> None:
        if self._group is not None:
            with self._group.lock:
                self._group.texts.extend(self._number, observation.tokens)
            super().observe(observation)

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
