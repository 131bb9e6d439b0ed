"""Drafters that look up what followed the last tokens elsewhere."""

from __future__ import annotations

import numpy as np

from .drafter import PathDrafter
from .observation import Observation
from .tree import DraftTree


class LookUp(PathDrafter):
    """Drafts what has followed the last tokens elsewhere: a subclass implements `look_up`.

    Attributes:
        longest_match (`int`): How many of the last tokens are looked up.
    """

    longest_match: int
    _context = np.empty(0, dtype=np.int32)  # the last tokens of the text
    _of_a_call = (*PathDrafter._of_a_call, "_context")

    def begin(self, prompt_ids: np.ndarray, vocab_size: int) -> None:
        self._context = prompt_ids[-self.longest_match :].astype(np.int32)

    def draft(self, budget: int) -> DraftTree:
        if budget == 0 or len(self._context) == 0:
            return DraftTree.empty()
        return self.look_up(self._context, budget, behind_path=False)

    def continue_path(self, path: np.ndarray, budget: int) -> DraftTree:
        return self.look_up(self._followed_by(path), budget, behind_path=True)

    def look_up(self, context: np.ndarray, budget: int, behind_path: bool) -> DraftTree:
        """Drafts at most `budget` > 0 nodes that may follow `context`, int32 of shape `(n,)` with
        n > 0: the last tokens of the text, or of a path behind it."""
        raise NotImplementedError(f"{type(self).__name__} must implement look_up")

    def observe(self, observation: Observation) -> None:
        self._context = self._followed_by(observation.tokens)

    def _followed_by(self, tokens: np.ndarray) -> np.ndarray:
        joined = np.concatenate((self._context, tokens[-self.longest_match :]), dtype=np.int32)
        return joined[-self.longest_match :]
