"""REST's trie: all that follows the longest match of the last tokens in a datastore.

"REST: Retrieval-Based Speculative Decoding" (arXiv 2311.08252, section 3): the longest suffix of
the text that stands in the datastore is searched in its suffix arrays, its continuations are put
into a trie weighted by frequency, and the most frequent nodes are the draft. Reading and growing
serve several match lengths at a time, which mixed_trie.py has.
"""

# mypy: disallow-untyped-defs=False

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
    plan = [
        (match.length, match.count, quota, limit)
        for match, quota, limit in zip(matches, quotas, limits, strict=True)
    ]
    # Each text has at least a row.
    room = sum(min(places, quota + len(texts)) for _, places, quota, _ in plan)
    read = (
        np.empty((room, max(limits)), np.int32),
        np.empty(room, np.int32),
        np.empty(room, np.int32),
        np.empty(room, np.float64),
    )
    ranges = np.array([match.ranges for match in matches])
    plan_array, count = np.array(plan, dtype=np.int64), 0
    for i, text in enumerate(texts):
        searched = text.tokens, text.suffixes, text.vocab_size, ranges[:, i]
        count = sample_continuations(*searched, plan_array, count, *read)
    return grow_trie(*(each[:count] for each in read), len(matches), pseudo_count, budget)


class _Continuations(NamedTuple):
    """The continuations, each a proposal of the growth, and room for what an order counts for."""

    rows: np.ndarray
    lengths: np.ndarray
    orders: np.ndarray
    occurrences: np.ndarray
    pseudo_count: float
    order_weights: np.ndarray  # float64 of shape (orders,)
    order_rows: np.ndarray  # int64 of shape (orders,)


@kernel(f"{TREE}(int32[:, ::1], int32[::1], int32[::1], float64[::1], int64, float64, int64)")
def grow_trie(rows, lengths, orders, occurrences, order_count, pseudo_count, budget):
    """Grows a draft tree from what followed matches of several lengths, best node first.

    At every node each length of match (an order) that still has continuations there estimates the
    next token by their frequencies. The longest with n continuations counts with probability
    n / (n + pseudo_count) and backs off to the next shorter one with what is left, as prediction by
    partial matching does; what the shortest leaves is nobody's, so that probabilities fall where
    little is known.

    Args:
        rows, lengths, orders, occurrences: From `sample_continuations`.
        order_count: The number of orders; 0 is the longest match.
        pseudo_count: 0.0 lets the longest match alone decide.
        budget: The most nodes.
    """
    weights, numbers = np.empty(order_count, np.float64), np.empty(order_count, np.int64)
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
