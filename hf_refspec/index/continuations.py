"""The draft tree of all that followed a context's last tokens in indexed texts."""

# mypy: disallow-untyped-defs=False
# The types of a kernel's arguments are those of its numba signature.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .kernels import heap_pop, heap_push, kernel
from .suffix_array import IndexedText

# So many continuations of a match are as good a witness as all the shorter matches together.
DOUBT = 30.0
# A shorter match that would have less than this share of the say is not looked for.
LEAST_SHARE = 0.02
# Continuations that are read of a match, however little it has to say.
FEWEST_ROWS = 16
# Where the longest match leaves no choice, its continuation goes on so many times further.
FURTHER = 3


@dataclass(frozen=True, slots=True)
class Match:
    """All places where the last tokens of a context stand.

    Attributes:
        length (`int`): How many last tokens.
        ranges (`list[tuple[int, int]]`): Of each text, the range in its suffix array.
    """

    length: int
    ranges: list[tuple[int, int]]

    @property
    def count(self) -> int:
        """The number of places."""
        return sum(high - low for low, high in self.ranges)


def find_match(texts: Sequence[IndexedText], context: np.ndarray, length: int) -> Match:
    """Finds the last `length` tokens of a context in all texts."""
    pattern = context[len(context) - length :]
    return Match(length, [text.find(pattern) for text in texts])


def longest_match(
    texts: Sequence[IndexedText], context: np.ndarray, min_match: int
) -> Match | None:
    """Finds the longest suffix of a context that stands in any of the texts.

    Args:
        texts (sequence of [`IndexedText`]): Where to look.
        context (`np.ndarray`, int32 of shape `(n,)`): The last tokens, as many as may match.
        min_match (`int`): The shortest match that counts.

    Returns:
        [`Match`] or `None`: `None` if none is long enough.
    """
    # What is found with n tokens is found with fewer: a binary search for the greatest length.
    longest, low, high = None, min_match, len(context)
    while low <= high:
        middle = (low + high + 1) // 2
        match = find_match(texts, context, middle)
        if match.count:
            longest, low = match, middle + 1
        else:
            high = middle - 1
    return longest


def mixed_matches(texts: Sequence[IndexedText], context: np.ndarray, min_match: int) -> list[Match]:
    """The longest match and the shorter ones that still have something to say, longest first.

    Arguments as of [`longest_match`].
    """
    match = longest_match(texts, context, min_match)
    if match is None:
        return []
    matches = [match]
    share = _doubt(match)
    for length in range(match.length - 1, min_match - 1, -1):
        if share < LEAST_SHARE:
            break
        shorter = find_match(texts, context, length)
        if shorter.count > matches[-1].count:  # otherwise it stands in the same places
            matches.append(shorter)
            share *= _doubt(shorter)
    return matches


def _doubt(match: Match) -> float:
    """The share of the say that a match leaves to shorter ones."""
    return DOUBT / (match.count + DOUBT)


def tree_of_mixed(
    texts: Sequence[IndexedText],
    matches: Sequence[Match],
    budget: int,
    max_continuations: int,
    continuation_length: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Grows a draft tree out of matches of several lengths, see [`grow_from_continuations`].

    Args:
        texts (sequence of [`IndexedText`]): Where the matches are.
        matches (sequence of [`Match`]): The longest one first.
        budget (`int`): The most nodes.
        max_continuations (`int`): How many continuations are read, about.
        continuation_length (`int`): How far they are read; those of the longest match are read
            further, for the case that they leave no choice.

    Returns:
        The tree's tokens (int64), parents (int32) and probabilities (float32).
    """
    shares, left = [], 1.0
    for match in matches:
        shares.append(left * (1 - _doubt(match)))
        left -= shares[-1]
    quotas = [max(FEWEST_ROWS, int(max_continuations * each / sum(shares))) for each in shares]
    return _tree(texts, matches, quotas, budget, continuation_length, FURTHER, DOUBT)


def tree_of_longest(
    texts: Sequence[IndexedText],
    match: Match,
    budget: int,
    max_continuations: int,
    continuation_length: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Grows REST's draft tree: the most frequent nodes of the trie of all continuations.

    Arguments and result as of [`tree_of_mixed`].
    """
    return _tree(texts, [match], [max_continuations], budget, continuation_length, 1, 0.0)


def _tree(
    texts: Sequence[IndexedText],
    matches: Sequence[Match],
    quotas: Sequence[int],
    budget: int,
    continuation_length: int,
    further: int,
    doubt: float,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Reads continuations, at most about `quotas[i]` of `matches[i]`, and grows the tree."""
    samples = []  # the rows of each text: its match, how many there are, how many are read
    for order, (match, quota) in enumerate(zip(matches, quotas, strict=True)):
        count = match.count
        for text, (low, high) in zip(texts, match.ranges, strict=True):
            if low < high:
                # A text's due, but at least one: what only a small shard has is worth a row.
                read = max(min(high - low, (high - low) * quota // count), 1)
                samples.append((order, text, low, high, read))
    total = sum(sample[-1] for sample in samples)
    rows = np.empty((total, continuation_length * further), dtype=np.int32)
    lengths = np.empty(total, dtype=np.int32)
    occurrences = np.empty(total, dtype=np.float64)
    orders = np.empty(total, dtype=np.int32)
    end = 0
    for order, text, low, high, count in samples:
        part = slice(end, end + count)
        end += count
        text.sample(low, high, matches[order].length, rows[part], lengths[part])
        if order > 0:
            np.minimum(lengths[part], continuation_length, out=lengths[part])
        occurrences[part] = (high - low) / count
        orders[part] = order
    tokens = np.empty(budget, dtype=np.int64)
    parents = np.empty(budget, dtype=np.int32)
    probs = np.empty(budget, dtype=np.float32)
    size = grow_from_continuations(
        rows, lengths, occurrences, orders, doubt, tokens, parents, probs
    )
    return tokens[:size], parents[:size], probs[:size]


@kernel(
    "int64(int32[:, ::1], int32[::1], float64[::1], int32[::1], float64,"
    "int64[::1], int32[::1], float32[::1])"
)
def grow_from_continuations(rows, lengths, occurrences, orders, doubt, tokens, parents, probs):
    """Grows a draft tree from what followed matches of several lengths, best node first.

    At every node each length of match (an order) that still has continuations there votes on the
    next token. The longest with n continuations has the say with probability n / (n + doubt), and
    leaves the rest to the next shorter one, as prediction by partial matching does; what the
    shortest leaves over is nobody's, so that probabilities fall where little is known.

    Args:
        rows: int32 of shape (continuations, longest), a continuation a row, grouped by order.
        lengths: How many tokens of each row there are.
        occurrences: How many places in the texts each row stands for.
        orders: The order of each row: 0 is the longest match, ascending.
        doubt: 0.0 lets the longest match alone decide.
        tokens, parents, probs: The tree is written here; their length is the budget.

    Returns:
        The number of nodes.
    """
    budget, count = len(tokens), len(rows)
    # The rows of a node are a linked list. A node that waits in the heap is known by its first row,
    # which all the arrays here are indexed with.
    following = np.empty(count, dtype=np.int32)
    for i in range(count):
        following[i] = i + 1 if i + 1 < count else -1
    prob = np.empty(count, dtype=np.float64)
    parent = np.empty(count, dtype=np.int32)
    depth = np.empty(count, dtype=np.int32)
    children = np.empty(count, dtype=np.int32)
    heap = np.empty(count, dtype=np.int32)
    waiting = 0
    # What the rows of each order at a node stand for, and how many they are.
    order_count = orders[-1] + 1 if count else 0
    order_places = np.empty(order_count, dtype=np.float64)
    order_rows = np.empty(order_count, dtype=np.int64)
    # From a token to the child that has it: a hash table, whose entries are void at another node.
    table_size = 1
    while table_size < 2 * count:
        table_size *= 2
    table = np.empty(table_size, dtype=np.int32)
    table_node = np.empty(table_size, dtype=np.int32)
    table_node[:] = -2

    size, node, node_depth, node_prob, row = 0, -1, 0, 1.0, 0 if count else -1
    while True:
        # How much one place of each order has to say here.
        order_places[:] = 0.0
        order_rows[:] = 0
        each = row
        while each >= 0:
            order_places[orders[each]] += occurrences[each]
            order_rows[orders[each]] += 1
            each = following[each]
        left = 1.0
        for order in range(order_count):
            if order_rows[order] > 0:
                share = left * order_rows[order] / (order_rows[order] + doubt)
                left -= share
                order_places[order] = share / order_places[order]

        # The node's rows are divided among its children.
        child_count = 0
        while row >= 0:
            next_row = following[row]
            if lengths[row] > node_depth:
                token = rows[row, node_depth]
                vote = node_prob * occurrences[row] * order_places[orders[row]]
                slot = (token * 40503) & (table_size - 1)
                while table_node[slot] == node and rows[table[slot], node_depth] != token:
                    slot = (slot + 1) & (table_size - 1)
                if table_node[slot] != node:
                    table_node[slot] = node
                    table[slot] = row
                    prob[row] = vote
                    following[row] = -1
                    children[child_count] = row
                    child_count += 1
                else:
                    child = table[slot]
                    prob[child] += vote
                    following[row] = following[child]
                    following[child] = row
            row = next_row
        for i in range(child_count):
            child = children[i]
            parent[child] = node
            depth[child] = node_depth + 1
            heap_push(heap, waiting, prob, child)
            waiting += 1
        if waiting == 0 or size == budget:
            return size

        # The most probable of the nodes that wait joins the tree.
        row = heap_pop(heap, waiting, prob)
        waiting -= 1
        node, node_depth = size, depth[row]
        # Votes that should add up to their parent's probability can pass it by a rounding.
        node_prob = min(prob[row], probs[parent[row]] if parent[row] >= 0 else 1.0)
        tokens[node], parents[node] = rows[row, node_depth - 1], parent[row]
        probs[node] = node_prob
        size += 1
