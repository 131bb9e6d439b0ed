"""The draft tree: what a drafter proposes and the target model verifies in one forward pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np

from ..index.best_first import TREE_TYPE, grower, njit_no_alloc
from ..kernels.kernel import kernel

# The parent of the first nodes: the last accepted token, which is not a node itself.
ROOT = -1
# The most nodes of a draft. From about this number of tokens on, a pass takes time in proportion to
# them on any device (an H100 with 16-bit weights from 300 on, with 4-bit weights from 1,200 on):
# two passes yield as much as one of twice the size.
MOST_NODES = 1024

# Faults of a tree: a token outside of the vocabulary, a parent after its child, two siblings with
# the same token, a probability outside of [0, 1] or larger than its parent's.
FOREIGN_TOKEN = 1
LATE_PARENT = 2
SAME_TOKEN = 3
RISING_PROB = 4


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

    Lists and arrays of other numbers are converted.

    Raises:
        ValueError: If one of them has another type or shape.
    """

    tokens: np.ndarray
    parents: np.ndarray
    probs: np.ndarray

    def __post_init__(self) -> None:
        for name, dtype in _DTYPES:
            value = getattr(self, name)
            array = np.asarray(value)
            if array is value and array.dtype == dtype and array.ndim == 1 and array.flags.carray:
                continue
            kinds = "iu" if np.issubdtype(dtype, np.integer) else "iuf"
            if array.ndim != 1 or (len(array) and array.dtype.kind not in kinds):
                raise ValueError(
                    f"DraftTree.{name} must be a 1-D {np.dtype(dtype)} array, but has the "
                    f"shape {array.shape} and the dtype {array.dtype}"
                )
            converted = np.require(array, dtype, ["C", "W"])
            if kinds == "iu" and not np.array_equal(converted, array):
                raise ValueError(f"DraftTree.{name} has numbers that are no {np.dtype(dtype)}")
            object.__setattr__(self, name, converted)

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
        parents = np.arange(-1, len(tokens) - 1, dtype=np.int32)
        estimates = np.ones(len(tokens), np.float32) if probs is None else np.asarray(probs)
        return cls(np.asarray(tokens), parents, estimates)

    def __len__(self) -> int:
        return len(self.tokens)

    def _repr_html_(self) -> str:
        """Each node's token and probability, indented by its depth, best first."""
        lines = ["root"]
        for node, depth in self.walk():
            lines.append(f"{'  ' * depth}{self.tokens[node]} {100 * self.probs[node]:.0f} %")
        return "<pre>{}</pre>".format("\n".join(lines))

    def walk(self) -> Iterator[tuple[int, int]]:
        """Each node with its depth, in the order of a depth-first search."""
        depths = self.depths().tolist()
        left = np.flatnonzero(self.parents == ROOT)[::-1].tolist()
        while left:
            node = left.pop()
            yield node, depths[node]
            left += np.flatnonzero(self.parents == node)[::-1].tolist()

    @property
    def is_chain(self) -> bool:
        """True if the nodes form one path; also without nodes."""
        return bool((self.parents == np.arange(-1, len(self) - 1)).all())

    def depths(self) -> np.ndarray:
        """The depth of each node, int32 of shape `(T,)`; a child of the root has depth 1."""
        return tree_depths(self.parents)

    def ancestors(self) -> np.ndarray:
        """The nodes that each node sees, bool of shape `(T, T)`.

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
        nodes: list[int] = []
        while node != ROOT:
            nodes.append(node)
            node = int(self.parents[node])
        return self.tokens[nodes[::-1]]

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
        """This tree, which a custom drafter may have drafted.

        Args:
            vocab_size (`int`): The target model's; tokens are from 0 to `vocab_size` - 1.

        Raises:
            ValueError: if an array has another length, a token is outside of the vocabulary, a
                parent does not come before its child, two siblings have the same token, or a
                probability is not in [0, 1] or larger than the parent's.
        """
        for name in ("parents", "probs"):
            count = len(getattr(self, name))
            if count != len(self):
                raise ValueError(f"DraftTree.{name} has {count} entries for {len(self)} tokens")
        fault = tree_fault(self.tokens, self.parents, self.probs, vocab_size)
        if fault == FOREIGN_TOKEN:
            raise ValueError(
                f"DraftTree.tokens has ids from {self.tokens.min()} to {self.tokens.max()}, "
                f"outside of the target model's vocabulary of {vocab_size}"
            )
        if fault:
            raise ValueError(_FAULTS[fault])
        return self


def merged(trees: Sequence[DraftTree], budget: int) -> DraftTree:
    """Merges draft trees into one of at most `budget` nodes, see [`merge_trees`]."""
    sizes = np.array([len(tree) for tree in trees])
    tokens = np.concatenate([tree.tokens for tree in trees])
    parents = np.concatenate([tree.parents for tree in trees])
    probs = np.concatenate([tree.probs for tree in trees])
    return DraftTree(*merge_trees(sizes, tokens, parents, probs, budget))


def after_path(path: np.ndarray, prob: float, tree: DraftTree) -> DraftTree:
    """A tree moved to the end of a path, int64 of shape `(n,)`, of probability `prob`, to be merged
    with the tree that has the path. The path's nodes have probability 0 here, so that the other
    tree's estimates of them stay as they are: 1 - (1 - p)(1 - 0) = p."""
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


@kernel("int64(int64[::1], int32[::1], float32[::1], int64)", interpreted=True)
def tree_fault(tokens, parents, probs, vocab_size):
    """The fault of the first faulty node of a tree of shape `(T,)`; 0 for a valid tree."""
    child = np.full(len(tokens) + 1, -1, dtype=np.int32)  # the last child; the root's at the end
    sibling = np.empty(len(tokens), dtype=np.int32)  # the child of the same parent before it
    for node in range(len(tokens)):
        parent = parents[node]
        if not 0 <= tokens[node] < vocab_size:
            return FOREIGN_TOKEN
        if not -1 <= parent < node:
            return LATE_PARENT
        other = sibling[node] = child[parent]
        while other >= 0:
            if tokens[other] == tokens[node]:
                return SAME_TOKEN
            other = sibling[other]
        child[parent] = node
        if not 0 <= probs[node] <= (1 if parent < 0 else probs[parent]):
            return RISING_PROB
    return 0


@kernel("int32[::1](int32[::1])", interpreted=True)
def tree_depths(parents):
    """The depth of each node, `(T,)`: 1 for the children of the root."""
    depths = np.empty(len(parents), dtype=np.int32)
    for node in range(len(parents)):
        depths[node] = 1 if parents[node] < 0 else depths[parents[node]] + 1
    return depths


@kernel("boolean[:, ::1](int32[::1])", interpreted=True)
def tree_ancestors(parents):
    """True at `[i, j]` if node `j` is node `i` or an ancestor of it, `(T, T)`."""
    ancestors = np.zeros((len(parents), len(parents)), dtype=np.bool_)
    for node in range(len(parents)):
        ancestor = node
        while ancestor >= 0:
            ancestors[node, ancestor] = True
            ancestor = parents[ancestor]
    return ancestors


@kernel("int32[::1](int32[::1], float32[::1])", interpreted=True)
def best_path(parents, probs):
    """The nodes of the path with the largest sum of `probs`, top down; the first of equal ones."""
    sums = np.zeros(len(parents), dtype=np.float64)
    depths = np.zeros(len(parents), dtype=np.int64)
    best = -1
    for node in range(len(parents)):
        parent = parents[node]
        sums[node] = probs[node] + (sums[parent] if parent >= 0 else 0.0)
        depths[node] = 1 + (depths[parent] if parent >= 0 else 0)
        if best < 0 or sums[node] > sums[best]:
            best = node
    path = np.empty(depths[best] if best >= 0 else 0, dtype=np.int32)
    for i in range(len(path) - 1, -1, -1):
        path[i] = best
        best = parents[best]
    return path


class _Merged(NamedTuple):
    """All nodes of some trees, merged by path; each is the one proposal of itself."""

    child: np.ndarray  # int32, the first child of each, -1 for none; the root's at the end
    sibling: np.ndarray  # int32, the next child of its parent
    token: np.ndarray  # int32
    prob: np.ndarray  # float32


@kernel(f"{TREE_TYPE}(int64[::1], int64[::1], int32[::1], float32[::1], int64)")
def merge_trees(sizes, tokens, parents, probs, budget):
    """Merges draft trees by token path and keeps the most probable nodes, best node first. The
    trees of `sizes` nodes follow one another, each with its own indices as parents.

    A path of several trees fails only if it fails in all of them, as if they were independent: with
    estimates p and q it has the probability 1 - (1 - p)(1 - q)."""
    total = len(tokens)
    child = np.full(total + 1, -1, dtype=np.int32)
    sibling = np.empty(total, dtype=np.int32)
    token = np.empty(total, dtype=np.int32)
    prob = np.empty(total, dtype=np.float32)
    merged = np.empty(total, dtype=np.int32)
    count = 0
    offset = 0
    for size in sizes:
        for i in range(offset, offset + size):
            parent = merged[offset + parents[i]] if parents[i] >= 0 else total
            node = child[parent]
            while node >= 0 and token[node] != tokens[i]:
                node = sibling[node]
            if node < 0:
                node = count
                count += 1
                token[node] = tokens[i]
                prob[node] = probs[i]
                sibling[node] = child[parent]
                child[parent] = node
            else:
                prob[node] = 1 - (1 - prob[node]) * (1 - probs[i])
            merged[i] = node
        offset += size
    return _grow_merged(_Merged(child, sibling, token, prob), total, total, 1, budget, False)


@njit_no_alloc
def expand_merged(found, growth, first, node, _depth, prob):
    """Proposes the children of a node of the merged tree; returns their number."""
    count = 0
    child = found.child[first if node >= 0 else len(found.sibling)]
    while child >= 0:
        growth.proposed[child] = found.token[child]
        growth.weights[child] = min(found.prob[child], prob)
        growth.children[count] = child
        count += 1
        child = found.sibling[child]
    return count


_grow_merged = grower(expand_merged)
