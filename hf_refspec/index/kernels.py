"""The compiled inner loops: plain loops over plain arrays, each compiled once by numba."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

logger = logging.getLogger("hf_refspec")

_kernels: list[Kernel] = []
_compile_lock = threading.Lock()


class Kernel:
    """A function that numba compiles for one signature, at its first call or by `warmup`."""

    def __init__(self, function: Callable, signature: str):
        self.__doc__ = function.__doc__
        self.python = function
        self._signature = signature
        self._compiled: Any = None
        _kernels.append(self)

    def __call__(self, *arguments: Any) -> Any:
        if self._compiled is None:
            _compile_all(awaited=True)
        return self._compiled(*arguments)

    def compile(self) -> bool:
        """Compiles it or loads it from numba's cache; says whether it had to be compiled."""
        if self._compiled is not None:
            return False
        try:
            compiled = njit(cache=True, nogil=True)(self.python)
            compiled.compile(self._signature)
        except (RuntimeError, OSError):  # no folder for the cache can be written
            compiled = njit(nogil=True)(self.python)
            compiled.compile(self._signature)
        compiled.disable_compile()
        self._compiled = compiled
        return not compiled.stats.cache_hits


def kernel(signature: str) -> Callable[[Callable], Kernel]:
    """Makes a function a `Kernel` with this numba signature."""
    return lambda function: Kernel(function, signature)


def warmup() -> None:
    """Compiles all kernels now (seconds, once: numba keeps them on disk), so that no call waits."""
    _compile_all(awaited=False)


def _compile_all(awaited: bool) -> None:
    start = time.perf_counter()
    with _compile_lock:
        compiled = sum([each.compile() for each in _kernels])
    if awaited and compiled:
        logger.warning(
            "This call waited %.1f s for hf_refspec's kernels to compile; "
            "hf_refspec.warmup() does it ahead of time.",
            time.perf_counter() - start,
        )


@kernel("void(int32[::1], int32[::1])")
def tree_depths(parents, depths):
    """Writes the depth of each node: 1 for the children of the root (parent -1)."""
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


@kernel("void(int32[::1], int64, int32[::1], int32[::1])")
def link_tokens(tokens, start, previous, latest):
    """Links the tokens from `start` on into the chains of a `TokenBuffer`."""
    for position in range(start, len(tokens)):
        token = tokens[position]
        if token < 0:
            previous[position] = -1
        else:
            previous[position] = latest[token]
            latest[token] = position


@kernel("void(int32[::1], int64, int32[::1], int32[::1])")
def unlink_tokens(tokens, length, previous, latest):
    """Takes the tokens from `length` on out of the chains again, the last one first."""
    for position in range(len(tokens) - 1, length - 1, -1):
        if tokens[position] >= 0:
            latest[tokens[position]] = previous[position]


@njit
def _common_suffix(text, position, context, skipped):
    """How many tokens up to `text[position]` equal those of `context` before its last `skipped`."""
    length = 0
    longest = min(position + 1, len(context) - skipped)
    while (
        length < longest and text[position - length] == context[len(context) - 1 - skipped - length]
    ):
        length += 1
    return length


@kernel("int64(int32[::1], int32[::1], int32[::1], int32[::1], int64)")
def longest_match(text, previous, latest, context, match_length):
    """Finds where the longest suffix of `context` stands in `text`, the first place of several.

    Args:
        text, previous, latest: A `TokenBuffer`.
        context: The last tokens, as many as may match.
        match_length: The shortest match that counts.

    Returns:
        The position after the match, -1 if there is none.
    """
    best = -1
    best_length = match_length
    position = _latest_of(latest, context, 0)
    while position >= 0:
        length = _common_suffix(text, position, context, 0)
        if length >= best_length:
            best = position + 1
            best_length = length
        position = previous[position]
    return best


@njit
def _latest_of(latest, context, skipped):
    """The last position of the token before the last `skipped` of `context`, or -1."""
    if skipped >= len(context):
        return -1
    token = context[len(context) - 1 - skipped]
    return latest[token] if 0 <= token < len(latest) else -1


@njit
def _heap_push(heap, size, keys, item):
    """Adds `item` to a heap of `size` items that has the largest `keys[item]` on top."""
    hole = size
    while hole > 0 and keys[heap[(hole - 1) // 2]] < keys[item]:
        heap[hole] = heap[(hole - 1) // 2]
        hole = (hole - 1) // 2
    heap[hole] = item


@njit
def _heap_pop(heap, size, keys):
    """Takes off the top of a heap of `size` items and returns it."""
    top = heap[0]
    moved = heap[size - 1]
    hole = 0
    child = 1
    while child < size - 1:
        if child + 1 < size - 1 and keys[heap[child + 1]] > keys[heap[child]]:
            child += 1
        if keys[heap[child]] <= keys[moved]:
            break
        heap[hole] = heap[child]
        hole = child
        child = 2 * hole + 1
    heap[hole] = moved
    return top


# A text has few matches that are worth following: at most this many of each match length at the
# root and of each other node's own (length 1), the latest. More did not draft better.
MATCHES_KEPT = 64
# The occurrences of one token that are looked at, the latest, so that a text of millions of
# tokens, or one token over and over, cannot stall a draft.
ROOT_OCCURRENCES = 1 << 16
NODE_OCCURRENCES = 128
# A match that skips one token which the target replaced says as much as one this much shorter.
SKIP_DISCOUNT = 0.15


@kernel(
    "int64(int32[::1], int32[::1], int32[::1], int32[::1], int64, int64, boolean,"
    "int64[::1], int32[::1], float32[::1])"
)
def grow_tree(
    text,
    previous,
    latest,
    context,
    match_length,
    copy_length,
    chain,
    tokens,
    parents,
    probs,
):
    """Grows a draft tree from all matches of the context, the most probable node first.

    A *match* is a position in `text` behind some tokens that equal the last tokens of the path to
    a node; it proposes `text[position]`. With `l` the match length, a match weighs `l ** 3`, and
    with `L` the longest at a node, one of its children is right with probability `L / (L + 1)`
    (a copy that held for `L` tokens will hold for one more: Laplace's rule of succession), divided
    among them by weight. On its way down a match gets longer by one at each node that agrees with
    it; other occurrences of the node's token join with length 1.

    Args:
        text, previous, latest: A `TokenBuffer`: what is copied from.
        context: The last tokens before the draft, as many as may match.
        match_length: The shortest match that counts.
        copy_length: The longest path.
        chain: Whether to grow a single path, each time the most probable child.
        tokens, parents, probs: The tree is written here; their length is the budget.

    Returns:
        The number of nodes.
    """
    budget = len(tokens)
    # Matches. Those of a node are a list, linked by `following`, and its first stands for the node
    # until it is taken into the tree: it is what waits in the heap.
    capacity = 2 * MATCHES_KEPT * len(context) + MATCHES_KEPT * budget
    positions = np.empty(capacity, dtype=np.int32)
    lengths = np.empty(capacity, dtype=np.float64)
    following = np.empty(capacity, dtype=np.int32)
    count = 0
    for skipped in range(2):
        kept = np.zeros(len(context) + 1, dtype=np.int32)
        position = _latest_of(latest, context, skipped)
        for _ in range(ROOT_OCCURRENCES):
            if position < 0 or kept[len(context) - skipped] == MATCHES_KEPT:
                break
            length = _common_suffix(text, position, context, skipped)
            after = position + 1 + skipped
            fresh = skipped == 0 or (
                length > 1 and after < len(text) and text[after - 1] != context[-1]
            )
            if fresh and length >= match_length and kept[length] < MATCHES_KEPT:
                kept[length] += 1
                positions[count] = after
                lengths[count] = length if skipped == 0 else SKIP_DISCOUNT * length
                following[count] = count + 1
                count += 1
            position = previous[position]
    if count == 0:
        return 0
    following[count - 1] = -1

    # Waiting nodes, by their first match.
    weight = np.empty(capacity, dtype=np.float64)
    prob = np.empty(capacity, dtype=np.float64)
    parent = np.empty(capacity, dtype=np.int32)
    depth = np.empty(capacity, dtype=np.int32)
    heap = np.empty(capacity, dtype=np.int32)
    heap_size = 0

    # The children of a node by token: an open hash table of their first matches.
    table_size = 1
    while table_size < 2 * capacity:
        table_size *= 2
    table = np.empty(table_size, dtype=np.int32)
    used_by = np.full(table_size, -2, dtype=np.int32)
    children = np.empty(capacity, dtype=np.int32)

    node, node_depth, node_prob, match = -1, 0, 1.0, 0
    size = 0
    while True:
        # Divide the node's matches among its children.
        child_count = 0
        total = 0.0
        longest = 0.0
        while match >= 0 and node_depth < copy_length:
            after = following[match]
            position = positions[match]
            if position < len(text) and text[position] >= 0:
                token = text[position]
                length = lengths[match]
                match_weight = length * length * length
                total += match_weight
                longest = max(longest, length)
                slot = (token * 40503) & (table_size - 1)
                while used_by[slot] == node and text[positions[table[slot]]] != token:
                    slot = (slot + 1) & (table_size - 1)
                if used_by[slot] != node:
                    used_by[slot] = node
                    table[slot] = match
                    following[match] = -1
                    weight[match] = match_weight
                    children[child_count] = match
                    child_count += 1
                else:
                    first = table[slot]
                    following[match] = following[first]
                    following[first] = match
                    weight[first] += match_weight
            match = after
        for i in range(child_count):
            child = children[i]
            prob[child] = node_prob * weight[child] / total * longest / (longest + 1.0)
            parent[child] = node
            depth[child] = node_depth + 1
            _heap_push(heap, heap_size, prob, child)
            heap_size += 1
        if heap_size == 0 or size == budget:
            return size

        # The most probable node that waits joins the tree.
        match = _heap_pop(heap, heap_size, prob)
        heap_size = 0 if chain else heap_size - 1
        parent_token = context[-1] if parent[match] < 0 else tokens[parent[match]]
        token = text[positions[match]]
        tokens[size] = token
        parents[size] = parent[match]
        probs[size] = prob[match]
        node, node_depth, node_prob = size, depth[match], prob[match]
        size += 1

        # Its matches go on behind it, and others of its token join them.
        continued = match
        while continued >= 0:
            positions[continued] += 1
            lengths[continued] += 1.0
            continued = following[continued]
        position = latest[token] if match_length == 1 else -1
        kept_here = 0
        for _ in range(NODE_OCCURRENCES):
            if position < 0 or kept_here == MATCHES_KEPT:
                break
            if position == 0 or text[position - 1] != parent_token:
                positions[count] = position + 1
                lengths[count] = 1.0
                following[count] = following[match]
                following[match] = count
                count += 1
                kept_here += 1
            position = previous[position]
