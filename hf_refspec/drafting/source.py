"""Drafters that do more inside a blend than to draft behind the text."""

from __future__ import annotations

import numpy as np

from .drafter import Drafter
from .tree import DraftTree

NO_PATH = np.empty(0, dtype=np.int64)


class Source(Drafter):
    """A drafter with further uses in a blend.

    Attributes:
        costly (`bool`): Whether it runs a model to draft: it is asked after the others.
        prunes (`bool`): Whether it knows what cannot follow: it prunes the others' trees, and
            continues them.
        known ([`DraftTree`]): What the sources before a costly one have drafted.
    """

    costly: bool = False
    prunes: bool = False
    known: DraftTree = DraftTree.empty()

    def continue_path(self, path: np.ndarray, budget: int) -> DraftTree:
        """Drafts what may follow the text and a path that another source has drafted, at most
        `budget` nodes. Called between `draft` and `observe`; by default nothing follows.

        Args:
            path (`np.ndarray`, int64 of shape `(n,)`): The tokens of the path.
        """
        return DraftTree.empty()

    def prune(self, tree: DraftTree, path: np.ndarray = NO_PATH) -> DraftTree:
        """Another source's tree without the nodes that cannot follow the text and a path. Called
        between `draft` and `observe` where it `prunes`; by default nothing is taken away.

        Args:
            tree ([`DraftTree`]): The draft of the other source behind the path.
            path (`np.ndarray`, int64 of shape `(n,)`, *optional*): The tokens of the path.
        """
        return tree
