"""REST's trie: all that follows the longest match of the last tokens in a datastore.

"REST: Retrieval-Based Speculative Decoding" (arXiv 2311.08252, section 3): the longest suffix of
the text that stands in the datastore is searched in its suffix arrays, its continuations are put
into a trie weighted by frequency, and the most frequent nodes are the draft. Reading and growing
serve several match lengths at a time, which mixed_trie.py has.
"""

# mypy: disallow-untyped-defs=False
# The types of a kernel's arguments are those of its numba signature.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .best_first import divide, expands, grow_best_first, new_growth
from .draft_tree import TreeArrays, tree_of
from .kernels import kernel
from .suffix_array import IndexedText


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

    Raises:
        ValueError: If a suffix array points outside of its text.
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


def rest_tree(
    texts: Sequence[IndexedText],
    context: np.ndarray,
    min_match: int,
    budget: int,
    max_continuations: int,
    continuation_length: int,
) -> TreeArrays:
    """REST's draft tree: the most frequent nodes of the trie of the longest match's continuations.

    Args:
        texts, context, min_match: As of [`all_matches`].
        budget (`int`): The most nodes.
        max_continuations (`int`): How many continuations are read, about.
        continuation_length (`int`): How far they are read.

    Raises:
        ValueError: If a text is damaged: its suffix array points outside of it, or it has a token
            outside of its vocabulary.
    """
    match = longest_match(texts, context, min_match)
    matches = [] if match is None else [match]
    limits, quotas = [continuation_length] * len(matches), [max_continuations] * len(matches)
    return trie_tree(texts, matches, quotas, limits, budget, 0.0)


def trie_tree(
    texts: Sequence[IndexedText],
    matches: Sequence[Match],
    quotas: Sequence[int],
    limits: Sequence[int],
    budget: int,
    pseudo_count: float,
) -> TreeArrays:
    """Reads the continuations of matches of several lengths and grows a draft tree out of them.

    Args:
        texts (sequence of [`IndexedText`]): Where the matches are.
        matches (sequence of [`Match`]): The longest one first.
        quotas, limits (sequence of `int`): About how many continuations of each match are read, and
            how far.
        budget (`int`): The most nodes.
        pseudo_count (`float`): See [`grow_trie`].
    """
    # (matches, texts, 2) and (matches,)
    ranges = np.array([match.ranges for match in matches], dtype=np.int64)
    ranges = ranges.reshape(len(matches), len(texts), 2)
    lengths_and_limits = np.array(
        [[match.length for match in matches], limits], dtype=np.int64
    ).reshape(2, -1)
    # (matches, texts): the rows that each range is read into.
    begins, counts = np.empty((2, *ranges.shape[:2]), dtype=np.int64)
    total = deal_rows(ranges, np.array(quotas, dtype=np.int64), begins, counts)
    rows = np.empty((total, max(limits, default=0)), dtype=np.int32)
    lengths = np.empty(total, dtype=np.int32)
    for i, text in enumerate(texts):
        text.sample(i, ranges, begins, counts, *lengths_and_limits, rows, lengths)
    return tree_of(budget, grow_trie, rows, lengths, ranges, counts, pseudo_count)


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
            # In proportion, but at least one: what only a small shard has is worth a row.
            due = max(places * quotas[i] // max(total, 1), 1)
            begins[i, text], counts[i, text] = end, min(places, due)
            end += counts[i, text]
    return end


class _Continuations(NamedTuple):
    """The continuations, each a proposal of the growth, and room for what an order counts for."""

    rows: np.ndarray
    lengths: np.ndarray
    orders: np.ndarray  # int32: the order of each row
    occurrences: np.ndarray  # float64: how many places in the texts each row stands for
    pseudo_count: float
    order_weights: np.ndarray  # float64 of shape (orders,)
    order_rows: np.ndarray  # int64 of shape (orders,)


@kernel(
    "int64(int32[:, ::1], int32[::1], int64[:, :, ::1], int64[:, ::1], float64,"
    "int64[::1], int32[::1], float32[::1])"
)
def grow_trie(rows, lengths, ranges, counts, pseudo_count, tokens, parents, probs):
    """Grows a draft tree from what followed matches of several lengths, best node first.

    At every node each length of match (an order) that still has continuations there estimates the
    next token by their frequencies. The longest with n continuations counts with probability
    n / (n + pseudo_count) and backs off to the next shorter one with what is left, as prediction by
    partial matching does; what the shortest leaves is nobody's, so that probabilities fall where
    little is known.

    Args:
        rows: int32 of shape (continuations, longest), a continuation a row, grouped by order.
        lengths: How many tokens of each row there are.
        ranges: int64 of shape (orders, texts, 2): where in the texts each order's matches are.
        counts: int64 of shape (orders, texts): how many rows, one after another, stand for them.
        pseudo_count: 0.0 lets the longest match alone decide.
        tokens, parents, probs: The tree is written here; their length is the budget.

    Returns:
        The number of nodes.
    """
    count = len(rows)
    if count == 0:
        return 0
    orders = np.empty(count, dtype=np.int32)
    occurrences = np.empty(count, dtype=np.float64)
    end = 0
    for order in range(counts.shape[0]):
        for text in range(counts.shape[1]):
            places = ranges[order, text, 1] - ranges[order, text, 0]
            for i in range(end, end + counts[order, text]):
                orders[i], occurrences[i] = order, places / counts[order, text]
            end += counts[order, text]
    continuations = _Continuations(
        rows,
        lengths,
        orders,
        occurrences,
        pseudo_count,
        np.empty(len(counts), dtype=np.float64),
        np.empty(len(counts), dtype=np.int64),
    )
    growth = new_growth(count, count)
    return grow_best_first(continuations, growth, False, tokens, parents, probs)


@expands(_Continuations)
def _expand(found, growth, first, node, depth, prob, tokens, parents):
    orders, occurrences = found.orders, found.occurrences
    lengths, rows = found.lengths, found.rows
    following, proposed, probs = growth.following, growth.tokens, growth.probs
    # What one place of each order weighs here.
    weights, order_rows = found.order_weights, found.order_rows
    for order in range(len(weights)):
        weights[order], order_rows[order] = 0.0, 0
    row = first
    while row >= 0:
        weights[orders[row]] += occurrences[row]
        order_rows[orders[row]] += 1
        row = following[row]
    left = 1.0
    for order in range(len(weights)):
        if order_rows[order] > 0:
            taken = left * order_rows[order] / (order_rows[order] + found.pseudo_count)
            left -= taken
            weights[order] = taken / weights[order]
    row = first
    while row >= 0:
        proposed[row] = -1
        if lengths[row] > depth:
            proposed[row] = rows[row, depth]
            probs[row] = prob * occurrences[row] * weights[orders[row]]
        row = following[row]
    return divide(growth, first, node)
