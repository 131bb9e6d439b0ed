"""REST's trie: all that follows the longest match of the last tokens in a datastore.

"REST: Retrieval-Based Speculative Decoding" (arXiv 2311.08252, section 3): the longest suffix of
the text that stands in the datastore is searched in its suffix arrays, its continuations are put
into a trie weighted by frequency, and the most frequent nodes are the draft. Reading and growing
serve several match lengths at a time, which mixed_trie.py has.
"""

# mypy: disallow-untyped-defs=False
# The types of a kernel's arguments are those of its numba signature.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .best_first import divide, expands, grow
from .draft_tree import TREE, TreeArrays
from .kernels import kernel
from .suffix_array import IndexedText, find_suffixes, sample_continuations


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


def all_matches(texts: Sequence[IndexedText], context: np.ndarray, min_match: int) -> list[Match]:
    """Finds the suffixes of a context that stand in any of the texts, the longest first.

    Args:
        texts (sequence of [`IndexedText`]): Where to look.
        context (`np.ndarray`, int32 of shape `(n,)`): The last tokens, as many as may match.
        min_match (`int`): The shortest match that counts.

    Raises:
        ValueError: If a suffix array points outside of its text.
    """
    found = [find_suffixes(text.tokens, text.suffixes, context, min_match) for text in texts]
    ranges = np.zeros((max(map(len, found), default=0), len(texts), 2), dtype=np.int64)
    for i, of_text in enumerate(found):
        ranges[: len(of_text), i] = of_text
    counts = (ranges[..., 1] - ranges[..., 0]).sum(axis=1).tolist()
    return [Match(min_match + i, ranges[i], counts[i]) for i in reversed(range(len(ranges)))]


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
    longest = all_matches(texts, context, min_match)[:1]
    return trie_tree(texts, longest, [max_continuations], [continuation_length], budget, 0.0)


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
        matches (sequence of [`Match`]): The longest one first; there may be none.
        quotas, limits (sequence of `int`): About how many continuations of each match are read, and
            how far.
        budget (`int`): The most nodes.
        pseudo_count (`float`): See [`grow_trie`].
    """
    if not matches:
        return np.empty(0, np.int64), np.empty(0, np.int32), np.empty(0, np.float32)
    ranges = np.array([match.ranges for match in matches])  # (matches, texts, 2)
    matched = [match.length for match in matches]
    matched, limits, quotas = np.array([matched, limits, quotas], dtype=np.int64)
    begins, counts, rows, lengths = deal_rows(ranges, quotas, limits.max())
    where = ranges, begins, counts, matched, limits
    for i, text in enumerate(texts):
        searched = text.tokens, text.suffixes, text.vocab_size, i
        sample_continuations(*searched, *where, rows, lengths)
    return grow_trie(rows, lengths, ranges, counts, pseudo_count, budget)


@kernel(
    "Tuple((int64[:, ::1], int64[:, ::1], int32[:, ::1], int32[::1]))(int64[:, :, ::1],"
    "int64[::1], int64)"
)
def deal_rows(ranges, quotas, longest):
    """Decides how many matches of each length are read from each text, and into which rows.

    Args:
        ranges: int64 of shape (matches, texts, 2): where the matches are.
        quotas: int64 of shape (matches,): about how many of each length are read.
        longest: How many tokens of each there can be.

    Returns:
        The first row and the number of rows of each range, int64 of shape (matches, texts); room
        for the rows, int32 of shape (rows, longest), and for their lengths, int32 of shape (rows,).
    """
    begins = np.empty(ranges.shape[:2], dtype=np.int64)
    counts = np.empty(ranges.shape[:2], dtype=np.int64)
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
    rows = np.empty((end, longest), dtype=np.int32)
    return begins, counts, rows, np.empty(end, dtype=np.int32)


class _Continuations(NamedTuple):
    """The continuations, each a proposal of the growth, and room for what an order counts for."""

    rows: np.ndarray
    lengths: np.ndarray
    orders: np.ndarray  # int32: the order of each row
    occurrences: np.ndarray  # float64: how many places in the texts each row stands for
    pseudo_count: float
    order_weights: np.ndarray  # float64 of shape (orders,)
    order_rows: np.ndarray  # int64 of shape (orders,)


@kernel(f"{TREE}(int32[:, ::1], int32[::1], int64[:, :, ::1], int64[:, ::1], float64, int64)")
def grow_trie(rows, lengths, ranges, counts, pseudo_count, budget):
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
        budget: The most nodes.
    """
    orders = np.empty(len(rows), dtype=np.int32)
    occurrences = np.empty(len(rows), dtype=np.float64)
    end = 0
    for order in range(counts.shape[0]):
        for text in range(counts.shape[1]):
            places = ranges[order, text, 1] - ranges[order, text, 0]
            for i in range(end, end + counts[order, text]):
                orders[i], occurrences[i] = order, places / counts[order, text]
            end += counts[order, text]
    weights, numbers = np.empty(len(counts), np.float64), np.empty(len(counts), np.int64)
    found = _Continuations(rows, lengths, orders, occurrences, pseudo_count, weights, numbers)
    return grow(found, len(rows), len(rows), budget, False)


@expands(_Continuations)
def _expand(found, growth, first, node, depth, prob):
    following, orders, occurrences = growth.following, found.orders, found.occurrences
    # What one place of each order weighs here.
    weights, numbers = found.order_weights, found.order_rows
    for order in range(len(weights)):
        weights[order], numbers[order] = 0.0, 0
    row = first
    while row >= 0:
        weights[orders[row]] += occurrences[row]
        numbers[orders[row]] += 1
        row = following[row]
    left = 1.0
    for order in range(len(weights)):
        if numbers[order] > 0:
            taken = left * numbers[order] / (numbers[order] + found.pseudo_count)
            left -= taken
            weights[order] = taken / weights[order]
    rows, lengths = found.rows, found.lengths
    row = first
    while row >= 0:
        growth.proposed[row] = rows[row, depth] if lengths[row] > depth else -1
        growth.weights[row] = prob * occurrences[row] * weights[orders[row]]
        row = following[row]
    return divide(growth, first, node)
