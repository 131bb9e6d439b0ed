"""Drafts from the other rows of a call that have the same prompt."""

from __future__ import annotations

import copy
import threading
from collections import Counter
from typing import Any

import numpy as np

from ..index.llma import LONGEST_MATCH, copy_tree
from ..index.token_buffer import JoinedTexts
from .contract import Call, LookUp, Observation
from .tree import DraftTree


class _Groups:
    """The rows of each prompt, from the first that begins to the last that ends. A copy or pickle
    of a drafter begins without any."""

    def __init__(self) -> None:
        self.texts: dict[bytes, JoinedTexts] = {}  # each row's end of the prompt, and its output
        self.rows = Counter[bytes]()
        self.lock = threading.Lock()  # kernels read texts while other threads run

    def __reduce__(self) -> tuple[Any, ...]:
        return _Groups, ()


class SiblingCopy(LookUp):
    """Copies what followed the last tokens in other rows with the same prompt, as these grow.

    For `num_return_sequences`, and for rollouts, where several rows answer one prompt: rows with
    equal prompts share one index. A row without another of its prompt drafts nothing. Forks share
    the indexes, so that the texts of a [`RunningBatch`] draft from one another as well.

    A row also copies from its own output; `ReferenceCopy() | SiblingCopy()` from the prompt, too.
    """

    longest_match = LONGEST_MATCH
    _texts: JoinedTexts | None = None
    _of_a_call = (*LookUp._of_a_call, "_texts", "_prompt", "_number")

    def __init__(self) -> None:
        self._groups = _Groups()

    def begin(self, prompt_ids: np.ndarray, vocab_size: int) -> None:
        self.end()
        super().begin(prompt_ids, vocab_size)
        self._prompt = prompt_ids.tobytes()
        groups = self._groups
        with groups.lock:
            groups.rows[self._prompt] += 1
            self._texts = groups.texts.setdefault(self._prompt, JoinedTexts())
            self._number = self._texts.add(self._context)

    def look_up(self, context: np.ndarray, budget: int, behind_path: bool, call: Call) -> DraftTree:
        texts = self._texts
        if texts is None or len(texts) == 1:
            return DraftTree.empty()
        chain = call.chain and not behind_path
        with self._groups.lock:
            tree, _ = copy_tree(texts.text, context, budget, 1, budget, chain, -1)
        return DraftTree(*tree)

    def observe(self, observation: Observation) -> None:
        if self._texts is not None:
            with self._groups.lock:
                self._texts.extend(self._number, observation.tokens)
            super().observe(observation)

    def fork(self) -> SiblingCopy:
        return copy.copy(self)

    def end(self) -> None:
        texts = self._texts
        self._texts = None
        groups = self._groups
        if texts is not None:
            with groups.lock:
                groups.rows[self._prompt] -= 1
                if not groups.rows[self._prompt]:
                    del groups.rows[self._prompt], groups.texts[self._prompt]
