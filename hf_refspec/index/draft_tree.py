"""Draft trees as arrays: tokens, parents (-1 is the root) and probabilities, parents first."""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np

from .best_first import grower, uncounted
from .kernels import kernel

# Tokens (int64), parents (int32) and probabilities (float32), each of shape (T,), and as numba's.
TreeArrays: TypeAlias = tuple[np.ndarray, np.ndarray, np.ndarray]
TREE_TYPE = "Tuple((int64[::1], int32[::1], float32[::1]))"

# Faults of a tree: a token outside of the vocabulary, a parent after its child, two siblings with
# the same token, a probability outside of [0, 1] or larger than its parent's.
FOREIGN_TOKEN = 1
LATE_PARENT = 2
SAME_TOKEN = 3
RISING_PROB = 4


@kernel("int64(int64[::1], int32[::1], float32[::1], int64)", interpreted=True)
def tree_fault(tokens, parents, probs, vocab_size):
    """The fault of the first faulty node, 0 if there is none; the arrays have the shape `(T,)`."""
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
    """The depth of each node, of shape `(T,)`: 1 for the children of the root."""
    depths = np.empty(len(parents), dtype=np.int32)
    for node in range(len(parents)):
        depths[node] = 1 if parents[node] < 0 else depths[parents[node]] + 1
    return depths


@kernel("boolean[:, ::1](int32[::1])", interpreted=True)
def tree_ancestors(parents):
    """True at `[i, j]` if node `j` is node `i` or an ancestor of it, of shape `(T, T)`."""
    ancestors = np.zeros((len(parents), len(parents)), dtype=np.bool_)
    for node in range(len(parents)):
        ancestor = node
        while ancestor >= 0:
            ancestors[node, ancestor] = True
            ancestor = parents[ancestor]
    return ancestors


@kernel("int32[::1](int32[::1], float32[::1])", interpreted=True)
def best_path(parents, probs):
    """The nodes (d,) of the path with the largest sum of `probs` (T,), top down; of paths with
    equal sums, the one whose last node comes first."""
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
    arrays (T,) hold one tree of `sizes` (m,) nodes after another, with its own indices as parents.

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


@uncounted
def expand_merged(found, growth, first, node, depth, prob):
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
