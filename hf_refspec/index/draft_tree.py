"""Draft trees as arrays: tokens, parents (-1 is the root) and probabilities, parents first."""

# mypy: disallow-untyped-defs=False
# The types of a kernel's arguments are those of its numba signature.

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from .best_first import heap_pop, heap_push
from .kernels import kernel

# Tokens (int64), parents (int32) and probabilities (float32), each of shape (T,).
TreeArrays: TypeAlias = tuple[np.ndarray, np.ndarray, np.ndarray]


def tree_of(budget: int, write: Callable[..., int], *arguments: Any) -> TreeArrays:
    """The tree of at most `budget` nodes that `write(*arguments, tokens, parents, probs)` writes.

    Args:
        budget (`int`): The most nodes: the length of the arrays that are written.
        write (callable): Writes the tree and returns the number of nodes.
        arguments: Its first arguments.
    """
    tokens = np.empty(budget, dtype=np.int64)
    parents = np.empty(budget, dtype=np.int32)
    probs = np.empty(budget, dtype=np.float32)
    size = write(*arguments, tokens, parents, probs)
    return tokens[:size], parents[:size], probs[:size]


@kernel("void(int32[::1], int32[::1])")
def tree_depths(parents, depths):
    """Writes the depth of each node: 1 for the children of the root."""
    for node in range(len(parents)):
        depths[node] = 1 if parents[node] < 0 else depths[parents[node]] + 1


@kernel("void(int32[::1], boolean[:, ::1])")
def tree_ancestors(parents, ancestors):
    """Sets `ancestors[i, j]` (false at first) where `j` is `i` or an ancestor of `i`."""
    for node in range(len(parents)):
        ancestor = node
        while ancestor >= 0:
            ancestors[node, ancestor] = True
            ancestor = parents[ancestor]


@kernel("int64(int32[::1], float32[::1], int32[::1])")
def best_path(parents, probs, path):
    """Writes the nodes of the path with the largest sum of `probs`, top down; returns its length.

    Of paths with equal sums it takes the one whose last node stands first.
    """
    sums = np.zeros(len(parents), dtype=np.float64)
    depths = np.zeros(len(parents), dtype=np.int64)
    best = -1
    for node in range(len(parents)):
        parent = parents[node]
        sums[node] = probs[node] + (sums[parent] if parent >= 0 else 0.0)
        depths[node] = 1 + (depths[parent] if parent >= 0 else 0)
        if best < 0 or sums[node] > sums[best]:
            best = node
    if best < 0:
        return 0
    length = depths[best]
    for i in range(length - 1, -1, -1):
        path[i] = best
        best = parents[best]
    return length


@kernel(
    "int64(int64[::1], int64[::1], int32[::1], float32[::1], int64[::1], int32[::1], float32[::1])"
)
def merge_trees(sizes, tokens, parents, probs, out_tokens, out_parents, out_probs):
    """Merges draft trees by token path and keeps the most probable nodes.

    A path that several trees have fails only if it fails in all of them, as if they were
    independent: with estimates p and q it has the probability 1 - (1 - p)(1 - q).

    Args:
        sizes: How many nodes each tree has.
        tokens, parents, probs: The trees one after another, each with its own indices as parents.
        out_tokens, out_parents, out_probs: The merged tree is written here, best node first; their
            length is the budget.

    Returns:
        The number of nodes.
    """
    total = len(tokens)
    # All nodes merged; their children are linked lists. The root's list is the one at the end.
    child = np.full(total + 1, -1, dtype=np.int32)
    sibling = np.empty(total, dtype=np.int32)
    token = np.empty(total, dtype=np.int64)
    prob = np.empty(total, dtype=np.float32)
    merged = np.empty(total, dtype=np.int32)
    count, offset = 0, 0
    for size in sizes:
        for i in range(offset, offset + size):
            parent = merged[offset + parents[i]] if parents[i] >= 0 else total
            node = child[parent]
            while node >= 0 and token[node] != tokens[i]:
                node = sibling[node]
            if node < 0:
                node = count
                count += 1
                token[node], prob[node] = tokens[i], probs[i]
                sibling[node] = child[parent]
                child[parent] = node
            else:
                prob[node] = 1 - (1 - prob[node]) * (1 - probs[i])
            merged[i] = node
        offset += size

    # Probabilities fall along each path, so that a parent is always taken before its children.
    heap = np.empty(total, dtype=np.int32)
    place = np.empty(total + 1, dtype=np.int32)
    waiting, size, node = 0, 0, total
    place[total] = -1
    parent_of = np.empty(total, dtype=np.int32)
    while True:
        each = child[node]
        while each >= 0:
            parent_of[each] = node
            if node < total:
                prob[each] = min(prob[each], prob[node])
            heap_push(heap, waiting, prob, each)
            waiting += 1
            each = sibling[each]
        if waiting == 0 or size == len(out_tokens):
            return size
        node = heap_pop(heap, waiting, prob)
        waiting -= 1
        place[node] = size
        out_tokens[size], out_probs[size] = token[node], prob[node]
        out_parents[size] = place[parent_of[node]]
        size += 1
