"""The draft tree of all that followed a context's last tokens in indexed texts."""

# mypy: disallow-untyped-defs=False
# The types of a kernel's arguments are those of its numba signature.

from __future__ import annotations

from collections.abc import Iterator, Sequence
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


@dataclass(frozen=True, slots=True, eq=False)
class Match:
    """All places where the last tokens of a context stand.

    Attributes:
        length (`int`): How many last tokens.
        ranges (`np.ndarray`, int64 of shape `(texts, 2)`): Of each text, the range in its suffix
            array, its end exclusive.
        count (`int`): The number of places.
    """

    length: int
    ranges: np.ndarray
    count: int


def all_matches(
    texts: Sequence[IndexedText], context: np.ndarray, min_match: int
) -> Iterator[Match]:
    """Finds the suffixes of a context that stand in any of the texts, the longest first.

    Args:
        texts (sequence of [`IndexedText`]): Where to look.
        context (`np.ndarray`, int32 of shape `(n,)`): The last tokens, as many as may match.
        min_match (`int`): The shortest match that counts.
    """
    ranges = np.empty((max(len(context) - min_match + 1, 0), len(texts), 2), dtype=np.int64)
    found = [text.find_suffixes(context, min_match, ranges[:, i]) for i, text in enumerate(texts)]
    ranges = ranges[: max(found, default=0)]
    counts = (ranges[..., 1] - ranges[..., 0]).sum(axis=1).tolist()
    for i in reversed(range(len(ranges))):
        yield Match(min_match + i, ranges[i], counts[i])


def longest_match(
    texts: Sequence[IndexedText], context: np.ndarray, min_match: int
) -> Match | None:
    """The first of [`all_matches`], `None` if there is none."""
    return next(all_matches(texts, context, min_match), None)


def mixed_matches(texts: Sequence[IndexedText], context: np.ndarray, min_match: int) -> list[Match]:
    """The longest match and the shorter ones that still have something to say, longest first.

    Arguments as of [`all_matches`].
    """
    matches: list[Match] = []
    share = 1.0
    for match in all_matches(texts, context, min_match):
        if share < LEAST_SHARE:
            break
        if not matches or match.count > matches[-1].count:  # else it stands in the same places
            matches.append(match)
            share *= _doubt(match)
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
    # (matches, texts, 2) and (matches,)
    ranges = np.array([match.ranges for match in matches], dtype=np.int64)
    ranges = ranges.reshape(len(matches), len(texts), 2)
    match_lengths = np.array([match.length for match in matches], dtype=np.int64)
    limits = np.full(len(matches), continuation_length, dtype=np.int64)
    limits[:1] *= further
    # (matches, texts): the rows that each range is read into.
    begins, counts = np.empty(ranges.shape[:2], np.int64), np.empty(ranges.shape[:2], np.int64)
    total = deal_rows(ranges, np.array(quotas, dtype=np.int64), begins, counts)
    rows = np.empty((total, continuation_length * further), dtype=np.int32)
    lengths = np.empty(total, dtype=np.int32)
    for i, text in enumerate(texts):
        text.sample(i, ranges, begins, counts, match_lengths, limits, rows, lengths)

    tokens = np.empty(budget, dtype=np.int64)
    parents = np.empty(budget, dtype=np.int32)
    probs = np.empty(budget, dtype=np.float32)
    size = grow_from_continuations(rows, lengths, ranges, counts, doubt, tokens, parents, probs)
    return tokens[:size], parents[:size], probs[:size]


@kernel("int64(int64[:, :, ::1], int64[::1], int64[:, ::1], int64[:, ::1])")
def deal_rows(ranges, quotas, begins, counts):
    """Decides how many matches of each length are read from each text, and into which rows.

    Args:
        ranges: int64 of shape (matches, texts, 2): where the matches are.
        quotas: int64 of shape (matches,): about how many of each length are read.
        begins, counts: int64 of shape (matches, texts): the rows, written here.

    Returns:
        The number of all rows.
    """
    end = 0
    for i in range(ranges.shape[0]):
        total = 0
        for text in range(ranges.shape[1]):
            total += ranges[i, text, 1] - ranges[i, text, 0]
        for text in range(ranges.shape[1]):
            places = ranges[i, text, 1] - ranges[i, text, 0]
            # A text's due, but at least one: what only a small shard has is worth a row.
            due = max(places * quotas[i] // max(total, 1), 1)
            begins[i, text], counts[i, text] = end, min(places, due)
            end += counts[i, text]
    return end


@kernel(
    "int64(int32[:, ::1], int32[::1], int64[:, :, ::1], int64[:, ::1], float64,"
    "int64[::1], int32[::1], float32[::1])"
)
def grow_from_continuations(rows, lengths, ranges, counts, doubt, tokens, parents, probs):
    """Grows a draft tree from what followed matches of several lengths, best node first.

    At every node each length of match (an order) that still has continuations there votes on the
    next token. The longest with n continuations has the say with probability n / (n + doubt), and
    leaves the rest to the next shorter one, as prediction by partial matching does; what the
    shortest leaves over is nobody's, so that probabilities fall where little is known.

    Args:
        rows: int32 of shape (continuations, longest), a continuation a row, grouped by order.
        lengths: How many tokens of each row there are.
        ranges: int64 of shape (orders, texts, 2): where in the texts each order's matches are.
        counts: int64 of shape (orders, texts): how many rows, one after another, stand for them.
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
    # Of each row, its order and how many places in the texts it stands for.
    orders = np.empty(count, dtype=np.int32)
    occurrences = np.empty(count, dtype=np.float64)
    end = 0
    for order in range(counts.shape[0]):
        for text in range(counts.shape[1]):
            places = ranges[order, text, 1] - ranges[order, text, 0]
            for i in range(end, end + counts[order, text]):
                orders[i], occurrences[i] = order, places / counts[order, text]
            end += counts[order, text]
    prob = np.empty(count, dtype=np.float64)
    parent = np.empty(count, dtype=np.int32)
    depth = np.empty(count, dtype=np.int32)
    children = np.empty(count, dtype=np.int32)
    heap = np.empty(count, dtype=np.int32)
    waiting = 0
    # What the rows of each order at a node stand for, and how many they are.
    order_count = len(counts)
    order_places = np.empty(order_count, dtype=np.float64)
    order_rows = np.empty(order_count, dtype=np.int64)
    # From a token to the child that has it: a hash table, whose entries are void at another node.
    table_size = 1
    while table_size < 2 * count:
        table_size *= 2
    table = np.empty(table_size, dtype=np.int32)
    table_node = np.full(table_size, -2, dtype=np.int32)

    size, node, node_depth, node_prob, row = 0, -1, 0, 1.0, 0 if count else -1
    while True:
        # How much one place of each order has to say here.
        for order in range(order_count):
            order_places[order], order_rows[order] = 0.0, 0
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
