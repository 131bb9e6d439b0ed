"""Drafters that can continue or prune what other sources of a blend have drafted."""

from __future__ import annotations

import numpy as np

from .drafter import Drafter
from .tree import DraftTree

NO_PATH = np.empty(0, dtype=np.int64)


class PathDrafter(Drafter):
    """A drafter that can also draft behind a path of tokens, not only behind the text.

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
        """Removes the nodes that cannot follow the text and a path from another source's tree.
        Called between `draft` and `observe` if it `prunes`; removes nothing by default.

        Args:
            tree ([`DraftTree`]): The other source's draft behind the path.
            path (`np.ndarray`, int64 of shape `(n,)`, *optional*): The tokens of the path.
        """
        return tree
