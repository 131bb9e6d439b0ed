"""The compiled inner loops: plain loops over plain arrays, each compiled once by numba."""

# mypy: disallow-untyped-defs=False
# The types of a kernel's arguments are those of its numba signature.

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
    """A function that numba compiles for its signatures, at its first call or by `warmup`."""

    def __init__(self, function: Callable, signatures: tuple[str, ...], drafts: bool):
        self.__doc__ = function.__doc__
        self.python = function
        self.drafts = drafts
        self._signatures = signatures
        self._compiled: Any = None
        _kernels.append(self)

    def __call__(self, *arguments: Any) -> Any:
        if self._compiled is None:
            module = self.python.__module__  # its neighbours will be needed as well
            _compile([k for k in _kernels if k.python.__module__ == module], awaited=True)
        return self._compiled(*arguments)

    def compile(self) -> bool:
        """Compiles it or loads it from numba's cache; says whether it had to be compiled."""
        if self._compiled is not None:
            return False
        try:
            compiled = self._compile(njit(cache=True, nogil=True)(self.python))
        except (RuntimeError, OSError):  # no folder for the cache can be written
            compiled = self._compile(njit(nogil=True)(self.python))
        compiled.disable_compile()
        self._compiled = compiled
        return not compiled.stats.cache_hits

    def _compile(self, function: Any) -> Any:
        for signature in self._signatures:
            function.compile(signature)
        return function


def kernel(*signatures: str, drafts: bool = True) -> Callable[[Callable], Kernel]:
    """Makes a function a `Kernel` with these numba signatures.

    Args:
        signatures (`str`): One for each combination of types.
        drafts (`bool`, *optional*, defaults to `True`): Whether it is needed to draft.
    """
    return lambda function: Kernel(function, signatures, drafts)


def warmup() -> None:
    """Compiles all kernels that draft now (seconds, once: numba keeps them on disk), so that no
    call waits. Those of retrievers are compiled by their first search."""
    _compile([each for each in _kernels if each.drafts], awaited=False)


def _compile(kernels: list[Kernel], awaited: bool) -> None:
    start = time.perf_counter()
    with _compile_lock:
        compiled = sum([each.compile() for each in kernels])
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


@njit
def heap_push(heap, size, keys, item):
    """Adds `item` to a heap of `size` items with the largest `keys[item]` on top."""
    hole = size
    while hole > 0 and keys[heap[(hole - 1) // 2]] < keys[item]:
        heap[hole] = heap[(hole - 1) // 2]
        hole = (hole - 1) // 2
    heap[hole] = item


@njit
def heap_pop(heap, size, keys):
    """Takes the top off a heap of `size` items and returns it."""
    top, moved = heap[0], heap[size - 1]
    hole, child = 0, 1
    while child < size - 1:
        if child + 1 < size - 1 and keys[heap[child + 1]] > keys[heap[child]]:
            child += 1
        if keys[heap[child]] <= keys[moved]:
            break
        heap[hole] = heap[child]
        hole, child = child, 2 * child + 1
    heap[hole] = moved
    return top


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


@njit
def _class_of(depth, share):
    """The classes of a node's depth (1, 2, 3-4, 5-8, deeper) and of its conditional probability."""
    depth_class = (
        0 if depth == 1 else 1 if depth == 2 else 2 if depth <= 4 else 3 if depth <= 8 else 4
    )
    share_class = 0
    for bound in (0.02, 0.05, 0.12, 0.25, 0.45, 0.7, 0.9):
        if share >= bound:
            share_class += 1
    return depth_class, share_class


@njit
def _share(parents, probs, node):
    """The probability of a node once its parent is accepted."""
    before = probs[parents[node]] if parents[node] >= 0 else 1.0
    return probs[node] / before if before > 0 else 0.0


@kernel(
    "void(int32[::1], float32[::1], float64[:, ::1], float64[:, ::1], float64[::1], float64,"
    "float64, float32[::1])"
)
def calibrate(parents, probs, expected, accepted, of_depth, prior, doubt, calibrated):
    """Corrects a tree's estimates by what became of earlier ones, see `Calibration`.

    Args:
        parents, probs: The tree with the source's own estimates.
        expected, accepted: The counts of each class of depth and share.
        of_depth: The correction of each class of depth.
        prior: How much it counts.
        doubt: The exponent of a share in the belief in it before anything is known.
        calibrated: The corrected probabilities, written.
    """
    depths = np.empty(len(parents), dtype=np.int32)
    for node in range(len(parents)):
        parent = parents[node]
        depths[node] = 1 if parent < 0 else depths[parent] + 1
        share = _share(parents, probs, node)
        i, j = _class_of(depths[node], share)
        believed = prior * of_depth[i] * share**doubt
        share *= (accepted[i, j] + believed) / (expected[i, j] + prior)
        before = calibrated[parent] if parent >= 0 else np.float32(1.0)
        calibrated[node] = min(before * share, before)


@kernel(
    "int64(int64[::1], int32[::1], float32[::1], int64[::1], float64, float64[:, ::1],"
    "float64[:, ::1])"
)
def record_outcome(tokens, parents, probs, emitted, memory, expected, accepted):
    """Adds a draft's nodes to the counts of `Calibration`, those whose parent was right.

    Args:
        tokens, parents, probs: The tree.
        emitted: The tokens that followed.
        memory: A class that expects more is halved.
        expected, accepted: The counts, changed in place.

    Returns:
        How many of the emitted tokens are a path of the tree.
    """
    agreed = 0
    depths = np.empty(len(parents), dtype=np.int32)
    right = np.zeros(len(parents), dtype=np.bool_)
    for node in range(len(parents)):
        parent = parents[node]
        depths[node] = 1 if parent < 0 else depths[parent] + 1
        if depths[node] > len(emitted) or (parent >= 0 and not right[parent]):
            continue
        right[node] = tokens[node] == emitted[depths[node] - 1]
        agreed += right[node]
        share = _share(parents, probs, node)
        i, j = _class_of(depths[node], share)
        expected[i, j] += share
        accepted[i, j] += right[node]
        if expected[i, j] > memory:
            expected[i, j] *= 0.5
            accepted[i, j] *= 0.5
    return agreed


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
def _latest_of(latest, token):
    """The last position of `token`, -1 if there is none."""
    return latest[token] if 0 <= token < len(latest) else -1


@njit
def _common_suffix(text, position, context, skipped):
    """How many tokens up to `text[position]` equal those of `context` before its last `skipped`."""
    last = len(context) - 1 - skipped
    length = 0
    while length <= min(position, last) and text[position - length] == context[last - length]:
        length += 1
    return length


@kernel("int64(int32[::1], int32[::1], int32[::1], int32[::1], int64)")
def longest_match(text, previous, latest, context, match_length):
    """Finds where the longest suffix of `context` stands in `text`, the first place of several.

    A place counts if a token follows it.

    Args:
        text, previous, latest: A `TokenBuffer`.
        context: The last tokens, as many as may match.
        match_length: The shortest match that counts.

    Returns:
        The position after the match, -1 if there is none.
    """
    best = -1
    best_length = match_length
    position = _latest_of(latest, context[-1]) if len(context) else -1
    while position >= 0:
        followed = position + 1 < len(text) and text[position + 1] >= 0
        length = _common_suffix(text, position, context, 0) if followed else 0
        if length >= best_length:
            best, best_length = position + 1, length
        position = previous[position]
    return best


# Of the matches of one length at the root the latest are kept, and as many of the matches that
# join at a node further down; more of them did not draft better.
MATCHES_KEPT = 64
# Occurrences of one token that are looked at, latest first, at the root and at another node: a text
# of millions of tokens, or of one token over and over, must not stall a draft.
ROOT_OCCURRENCES = 1 << 15
NODE_OCCURRENCES = 128
# There is room for matches that join at so many nodes, which bounds the memory of a huge draft.
MATCHED_NODES = 256
# A place that agrees with two tokens or more, but not with the last one, may go on where the target
# replaced one token. Such a match says less than a single equal token, which has length 1.
SKIP_LENGTH = 0.5
# Copying resumes near where it broke off: matches up to so far behind the last place that agreed
# with so many tokens weigh more.
ANCHOR_LENGTH = 6
NEAR = 32
NEAR_FACTOR = 3.0


@njit
def _root_matches(
    text, previous, latest, context, skipped, match_length, positions, lengths, count
):
    """Appends the matches of `context` without its last `skipped` (0 or 1) tokens, latest first.

    Returns:
        The number of matches now, and the longest of the new ones: its position and its length.
    """
    longest_position, longest = -1, 0
    if len(context) <= skipped:
        return count, longest_position, longest
    kept = np.zeros(len(context) + 1, dtype=np.int32)
    occurrence = _latest_of(latest, context[-1 - skipped])
    for _ in range(ROOT_OCCURRENCES):
        # Once there are enough of the greatest length, nothing better is to come.
        if occurrence < 0 or kept[len(context) - skipped] == MATCHES_KEPT:
            break
        position = occurrence + 1 + skipped
        usable = position < len(text) and text[position] >= 0 and text[position - 1] >= 0
        if skipped and usable:  # otherwise it is a match without skipping
            usable = text[position - 1] != context[-1]
        length = _common_suffix(text, occurrence, context, skipped) if usable else 0
        occurrence = previous[occurrence]
        if length < max(match_length, 1 + skipped) or kept[length] == MATCHES_KEPT:
            continue
        kept[length] += 1
        positions[count] = position
        lengths[count] = SKIP_LENGTH if skipped else length
        count += 1
        if length > longest:
            longest_position, longest = position, length
    return count, longest_position, longest


@kernel(
    "UniTuple(int64, 2)(int32[::1], int32[::1], int32[::1], int32[::1], int64, int64, int64,"
    "boolean, int64[::1], int32[::1], float32[::1])"
)
def grow_tree(
    text,
    previous,
    latest,
    context,
    anchor,
    match_length,
    copy_length,
    chain,
    tokens,
    parents,
    probs,
):
    """Grows a draft tree from all places in `text` that agree with the context, best node first.

    A match is a position in `text` behind tokens that equal the last tokens of the path to a node;
    `text[position]` is what it proposes for a child. A match of length l weighs l ** 3 (and more
    near the anchor). With L the longest match at a node, one of the children is accepted with
    probability L / (L + 1), after Laplace's rule of succession: a copy that held for L tokens. The
    children share it by the weight of their matches.

    A match goes down with the child that it proposes, one longer. Other occurrences of the child's
    token join it there with length 1, if matches so short may draft.

    Args:
        text, previous, latest: A `TokenBuffer`: what is copied from.
        context: The last tokens before the draft, as many as may match.
        anchor: The last place in `text` that was copied from for long, or -1.
        match_length: The shortest match that counts.
        copy_length: The longest path.
        chain: Whether to grow a single path, at each node to the most probable child.
        tokens, parents, probs: The tree is written here; their length is the budget.

    Returns:
        The number of nodes, and the new anchor.
    """
    budget = len(tokens)
    capacity = MATCHES_KEPT * (2 * len(context) + min(budget, MATCHED_NODES))
    positions = np.empty(capacity, dtype=np.int32)
    lengths = np.empty(capacity, dtype=np.float64)
    count, place, length = _root_matches(
        text, previous, latest, context, 0, match_length, positions, lengths, 0
    )
    count, skip_place, skip_length = _root_matches(
        text, previous, latest, context, 1, match_length, positions, lengths, count
    )
    if max(length, skip_length) >= ANCHOR_LENGTH:
        anchor = place if length >= skip_length else skip_place
    if count == 0:
        return 0, anchor

    # The matches of a node are a linked list. A node that waits in the heap is known by the first
    # of its matches, which all the arrays here are indexed with.
    following = np.empty(capacity, dtype=np.int32)
    for i in range(count):
        following[i] = i + 1 if i + 1 < count else -1
    weight = np.empty(capacity, dtype=np.float64)
    prob = np.empty(capacity, dtype=np.float64)
    parent = np.empty(capacity, dtype=np.int32)
    depth = np.empty(capacity, dtype=np.int32)
    children = np.empty(capacity, dtype=np.int32)
    heap = np.empty(capacity, dtype=np.int32)
    waiting = 0

    # From a token to the child that has it: a hash table, whose entries are void at another node.
    table_size = 1
    while table_size < 2 * capacity:
        table_size *= 2
    table = np.empty(table_size, dtype=np.int32)
    table_node = np.full(table_size, -2, dtype=np.int32)

    size, node, node_depth, node_prob, match = 0, -1, 0, 1.0, 0
    while True:
        # The node's matches are divided among its children.
        child_count, total, longest = 0, 0.0, 0.0
        while match >= 0 and node_depth < copy_length:
            next_match = following[match]
            position = positions[match]
            if position < len(text) and text[position] >= 0:
                token = text[position]
                match_weight = lengths[match] ** 3
                if anchor >= 0 and 0 <= position - anchor < NEAR:
                    match_weight *= NEAR_FACTOR
                total += match_weight
                longest = max(longest, lengths[match])
                slot = (token * 40503) & (table_size - 1)
                while table_node[slot] == node and text[positions[table[slot]]] != token:
                    slot = (slot + 1) & (table_size - 1)
                if table_node[slot] != node:
                    table_node[slot] = node
                    table[slot] = match
                    weight[match] = match_weight
                    following[match] = -1
                    children[child_count] = match
                    child_count += 1
                else:
                    child = table[slot]
                    weight[child] += match_weight
                    following[match] = following[child]
                    following[child] = match
            match = next_match
        for i in range(child_count):
            child = children[i]
            prob[child] = node_prob * weight[child] / total * longest / (longest + 1.0)
            parent[child] = node
            depth[child] = node_depth + 1
            heap_push(heap, waiting, prob, child)
            waiting += 1
        if waiting == 0 or size == budget:
            return size, anchor

        # The most probable of the nodes that wait joins the tree.
        match = heap_pop(heap, waiting, prob)
        waiting = 0 if chain else waiting - 1
        token = text[positions[match]]
        before = tokens[parent[match]] if parent[match] >= 0 else context[-1]
        tokens[size], parents[size], probs[size] = token, parent[match], prob[match]
        node, node_depth, node_prob = size, depth[match], prob[match]
        size += 1

        # Its matches go on behind it, and the other occurrences of its token join them.
        continued = match
        while continued >= 0:
            positions[continued] += 1
            lengths[continued] += 1.0
            continued = following[continued]
        occurrence = latest[token] if match_length == 1 else -1
        joined = 0
        for _ in range(NODE_OCCURRENCES):
            if occurrence < 0 or joined == MATCHES_KEPT or count == capacity:
                break
            if occurrence == 0 or text[occurrence - 1] != before:
                positions[count] = occurrence + 1
                lengths[count] = 1.0
                following[count] = following[match]
                following[match] = count
                count += 1
                joined += 1
            occurrence = previous[occurrence]
