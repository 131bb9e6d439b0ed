"""Drafters that do more in a blend than draft behind the text, and drafters that look up."""

from __future__ import annotations

import numpy as np

from .drafter import Drafter
from .observation import Observation
from .tree import DraftTree

NO_PATH = np.empty(0, dtype=np.int64)


class Source(Drafter):
    """A drafter with further uses in a blend.

    Attributes:
        costly (`bool`): Whether it runs a model to draft, and so drafts after the others.
        prunes (`bool`): Whether it knows what cannot follow, and so prunes and continues the
            others' trees.
        known ([`DraftTree`]): The drafts of the other sources, for one that is costly.
    """

    costly: bool = False
    prunes: bool = False
    known: DraftTree = DraftTree.empty()

    def draft(self, budget: int) -> DraftTree:
        return self.continue_path(NO_PATH, budget)

    def continue_path(self, path: np.ndarray, budget: int) -> DraftTree:
        """Drafts what may follow the text and a path that another source has drafted, at most
        `budget` nodes. Called between `draft` and `observe`; drafts nothing by default.

        Args:
            path (`np.ndarray`, int64 of shape `(n,)`): The tokens of the path.
        """
        return DraftTree.empty()

    def prune(self, tree: DraftTree, path: np.ndarray = NO_PATH) -> DraftTree:
        """Another source's tree without the nodes that cannot follow the text and a path. Called
        between `draft` and `observe` if it `prunes`; removes nothing by default.

        Args:
            tree ([`DraftTree`]): The other source's draft behind the path.
            path (`np.ndarray`, int64 of shape `(n,)`, *optional*): The tokens of the path.
        """
        return tree


class LookUp(Source):
    """Drafts what has followed the last tokens elsewhere: a subclass implements `look_up`.

    Attributes:
        longest_match (`int`): How many of the last tokens are looked up.
    """

    longest_match: int
    _context = np.empty(0, dtype=np.int32)  # the last tokens of the text

    def begin(self, prompt_ids: np.ndarray, vocab_size: int) -> None:
        self._context = prompt_ids[-self.longest_match :].astype(np.int32)

    def continue_path(self, path: np.ndarray, budget: int) -> DraftTree:
        context = self._followed_by(path)
        if budget == 0 or len(context) == 0:
            return DraftTree.empty()
        return self.look_up(context, budget, len(path) > 0)

    def look_up(self, context: np.ndarray, budget: int, behind_path: bool) -> DraftTree:
        """Drafts what may follow `context`, int32 of shape `(n,)` with n > 0: the last tokens of
        the text, or of a path behind it."""
        raise NotImplementedError(f"{type(self).__name__} must implement look_up")

    def observe(self, observation: Observation) -> None:
        self._context = self._followed_by(observation.tokens)

    def _followed_by(self, tokens: np.ndarray) -> np.ndarray:
        joined = np.concatenate((self._context, tokens[-self.longest_match :]), dtype=np.int32)
        return joined[-self.longest_match :]
