"""The draft tree: what a drafter proposes and the target model verifies in one forward pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from ..index.draft_tree import (
    FOREIGN_TOKEN,
    LATE_PARENT,
    RISING_PROB,
    SAME_TOKEN,
    best_path,
    merge_trees,
    tree_ancestors,
    tree_depths,
    tree_fault,
)

# The parent of the first nodes: the last accepted token, which is not a node itself.
ROOT = -1
# The most nodes of a draft. From about this number of tokens on, a pass takes time in proportion to
# them on any device (an H100 with 16-bit weights from 300 on, with 4-bit weights from 1,200 on):
# two passes yield as much as one of twice the size.
MOST_NODES = 1024


@dataclass(frozen=True, slots=True, eq=False)
class DraftTree:
    """Draft tokens as a tree below the last accepted token, its root, which is not among its nodes.

    Nodes follow their parents, and no two siblings have the same token, so that at most one path
    agrees with the target model.

    Attributes:
        tokens (`np.ndarray`, int64 of shape `(T,)`):
            The token of each node.
        parents (`np.ndarray`, int32 of shape `(T,)`):
            The index of each node's parent; -1 is the root.
        probs (`np.ndarray`, float32 of shape `(T,)`):
            Estimates that the node will be accepted (all of its path with it). They do not
            increase from a parent to its child.
    """

    tokens: np.ndarray
    parents: np.ndarray
    probs: np.ndarray

    @staticmethod
    @cache
    def empty() -> DraftTree:
        """The tree without nodes: one step of plain decoding."""
        return DraftTree.chain([])

    @classmethod
    def chain(
        cls, tokens: Sequence[int] | np.ndarray, probs: Sequence[float] | np.ndarray | None = None
    ) -> DraftTree:
        """A single path.

        Args:
            tokens (sequence of `int`): Its tokens; the first follows the last accepted token.
            probs (sequence of `float`, *optional*): Estimates that each token will be accepted; 1.0
                if not given.
        """
        length = len(tokens)
        return cls(
            tokens=np.asarray(tokens, dtype=np.int64),
            parents=np.arange(-1, length - 1, dtype=np.int32),
            probs=np.ones(length, np.float32) if probs is None else np.asarray(probs, np.float32),
        )

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        """Whether the nodes are one path (true of the empty tree)."""
        return bool((self.parents == np.arange(-1, len(self) - 1)).all())

    def depths(self) -> np.ndarray:
        """The depth of each node, int32 of shape `(T,)`; a child of the root has depth 1."""
        return tree_depths(self.parents)

    def ancestors(self) -> np.ndarray:
        """Which nodes each node sees, bool of shape `(T, T)`.

        `ancestors()[i, j]` is true where `j` is `i` itself or an ancestor of it: the lower right
        corner of the attention mask.
        """
        return tree_ancestors(self.parents)

    def best_chain(self) -> DraftTree:
        """The path with the largest expected number of accepted tokens, the sum of its `probs`."""
        path = best_path(self.parents, self.probs)
        return DraftTree.chain(self.tokens[path], self.probs[path])

    def path(self, node: int) -> np.ndarray:
        """The tokens from the root to a node, int64 of shape `(depth,)`."""
        tokens: list[int] = []
        while node >= 0:
            tokens.append(int(self.tokens[node]))
            node = int(self.parents[node])
        return np.array(tokens[::-1], dtype=np.int64)

    def along(self, tokens: Iterable[int]) -> list[int]:
        """The nodes of the path with these tokens, from the root as far as the tree has them."""
        children = self.children()
        node = ROOT
        nodes = []
        for token in tokens:
            if (node, token) not in children:
                break
            node = children[node, token]
            nodes.append(node)
        return nodes

    def children(self) -> dict[tuple[int, int], int]:
        """Each node's index by its parent (or `ROOT`) and its token."""
        if len(self) == 0:  # most passes where nothing repeats
            return {}
        edges = zip(self.parents.tolist(), self.tokens.tolist(), strict=True)
        return {edge: node for node, edge in enumerate(edges)}

    def truncated(self, max_depth: int) -> DraftTree:
        """The tree without its nodes deeper than `max_depth`."""
        if max_depth >= len(self):
            return self
        return self.part(self.depths() <= max_depth)

    def part(self, kept: np.ndarray) -> DraftTree:
        """The tree of some of its nodes.

        Args:
            kept (`np.ndarray`, bool of shape `(T,)`): Which nodes; a node's ancestors with it.
        """
        new_index = np.cumsum(kept, dtype=np.int32) - 1
        parents = np.where(self.parents < 0, np.int32(ROOT), new_index[self.parents])
        return DraftTree(self.tokens[kept], parents[kept], self.probs[kept])

    def checked(self, vocab_size: int) -> DraftTree:
        """The tree of a custom drafter, converted and checked.

        Args:
            vocab_size (`int`): The target model's; tokens are from 0 to `vocab_size` - 1.

        Returns:
            [`DraftTree`]: With arrays of the types above; other integers and lists are converted.

        Raises:
            ValueError: if an array has the wrong type or shape, a token is outside of the
                vocabulary, a parent does not come before its child, two siblings have the same
                token, or a probability is no number in [0, 1] or larger than the parent's.
        """
        arrays = [_converted(name, getattr(self, name), dtype) for name, dtype in _DTYPES]
        tree = DraftTree(*arrays)
        for name in ("parents", "probs"):
            count = len(getattr(tree, name))
            if count != len(tree):
                raise ValueError(f"DraftTree.{name} has {count} entries for {len(tree)} tokens")
        fault = tree_fault(tree.tokens, tree.parents, tree.probs, vocab_size)
        if fault == FOREIGN_TOKEN:
            raise ValueError(
                f"DraftTree.tokens has ids from {tree.tokens.min()} to {tree.tokens.max()}, "
                f"outside of the target model's vocabulary of {vocab_size}"
            )
        if fault:
            raise ValueError(_FAULTS[fault])
        return tree


def merged(trees: Sequence[DraftTree], budget: int) -> DraftTree:
    """Merges draft trees by token path into one of at most `budget` nodes, see
    [`~index.draft_tree.merge_trees`]."""
    sizes = np.array([len(tree) for tree in trees])
    tokens = np.concatenate([tree.tokens for tree in trees])
    parents = np.concatenate([tree.parents for tree in trees])
    probs = np.concatenate([tree.probs for tree in trees])
    return DraftTree(*merge_trees(sizes, tokens, parents, probs, budget))


def behind_path(path: np.ndarray, prob: float, tree: DraftTree) -> DraftTree:
    """A tree moved to the end of a path of probability `prob`, to be merged with the tree that has
    the path. The path's nodes have probability 0 here, so that the other tree's estimates of them
    stay as they are: 1 - (1 - p)(1 - 0) = p."""
    length = len(path)
    parents = np.where(tree.parents < 0, length - 1, tree.parents + length)
    return DraftTree(
        np.concatenate((path, tree.tokens)),
        np.concatenate((np.arange(-1, length - 1), parents), dtype=np.int32),
        np.concatenate((np.zeros(length), prob * tree.probs), dtype=np.float32),
    )


_FAULTS = {
    LATE_PARENT: "DraftTree.parents must be -1 (the root) or an earlier node's index",
    SAME_TOKEN: "DraftTree.tokens has two siblings with the same token",
    RISING_PROB: "DraftTree.probs must be in [0, 1] and must not increase from parent to child",
}
_DTYPES = (("tokens", np.int64), ("parents", np.int32), ("probs", np.float32))


def _converted(name: str, values: Any, dtype: type[np.generic]) -> np.ndarray:
    """Values as a contiguous, writable 1-D array, where that loses nothing."""
    array = np.asarray(values)
    if array.dtype == dtype and array.ndim == 1 and array.flags.carray:
        return array
    kinds = "iu" if np.issubdtype(dtype, np.integer) else "iuf"
    if array.ndim != 1 or (len(array) and array.dtype.kind not in kinds):
        raise ValueError(
            f"DraftTree.{name} must be a 1-D {np.dtype(dtype)} array, but has the shape "
            f"{array.shape} and the dtype {array.dtype}"
        )
    return np.require(array, dtype, ["C", "W"])
