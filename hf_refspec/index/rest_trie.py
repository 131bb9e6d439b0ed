"""REST's trie: the continuations of the longest match of the last tokens in a datastore.

"REST: Retrieval-Based Speculative Decoding" (arXiv 2311.08252, section 3): the longest suffix of
the text is searched in the datastore's suffix arrays, its continuations form a trie weighted by
frequency, and the most frequent nodes, less the longest paths among them, are the draft.

Beyond REST, where the longest match alone decides, `mixed_tree` mixes matches of several lengths: a
long but rare match is a poor witness. Each length backs off to the next shorter one: prediction by
partial matching (Cleary and Witten, 1984).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..kernels.kernel import kernel
from .best_first import TREE_TYPE, TreeArrays, divide, grower, njit_no_alloc
from .suffix_array import Continuations, IndexedText, find_suffixes, sample_continuations

# The number of continuations at which a match counts as much as all shorter ones together: the
# larger, the less a rare long match is trusted.
PSEUDO_COUNT = 30.0
# Matches that would count with a smaller probability are not worth the search.
LEAST_WEIGHT = 0.02
# Continuations read of a match, however little it counts: with fewer, chance would decide.
FEWEST_ROWS = 16
# The factor by which the longest match is read further, in case it leaves no choice: longer drafts
# of copied text, at the price of more reading in every draft.
FURTHER = 3
# The places of a match that are read: REST reads as many as its authors' code; a mixed tree hardly
# gains by more. And the tokens that are read after each.
REST_PLACES = 5000
MIXED_PLACES = 1000
CONTINUATION_LENGTH = 10


@dataclass(frozen=True, slots=True, eq=False)
class Match:
    """All places of the last tokens of a context."""

    length: int  # how many last tokens
    ranges: np.ndarray  # int64, (texts, 2), of each text the range in its suffix array
    count: int  # of places


def all_matches(texts: Sequence[IndexedText], context: np.ndarray, min_match: int) -> list[Match]:
    """Finds a context's (int32, (n,)) suffixes of `min_match` tokens on in texts, longest first."""
    found = [find_suffixes(text, context, min_match) for text in texts]
    ranges = np.zeros((max(map(len, found), default=0), len(texts), 2), dtype=np.int64)
    for i, of_text in enumerate(found):
        ranges[: len(of_text), i] = of_text
    counts = (ranges[..., 1] - ranges[..., 0]).sum(axis=1).tolist()
    return [Match(min_match + i, ranges[i], counts[i]) for i in reversed(range(len(ranges)))]


def rest_tree(
    texts: Sequence[IndexedText], context: np.ndarray, min_match: int, budget: int
) -> TreeArrays:
    """REST's draft tree of a context (n,), as its authors' code has it.

    It has the `budget` most frequent nodes of the trie of the longest match's continuations, which
    [`cut_to_choices`] then thins out. In each text the first `REST_PLACES` by the suffix array are
    read, `CONTINUATION_LENGTH` tokens each. See [`all_matches`]."""
    first = []  # places of the longest match in each text
    for match in all_matches(texts, context, min_match)[:1]:
        begins, ends = match.ranges.T
        ranges = np.stack([begins, np.minimum(ends, begins + REST_PLACES)], axis=1)
        first.append(Match(match.length, ranges, int((ranges[:, 1] - begins).sum())))
    counts = [match.count for match in first]
    tree = trie_tree(texts, first, counts, [CONTINUATION_LENGTH], budget, 0.0)
    return cut_to_choices(*tree, budget)


@kernel(f"{TREE_TYPE}(int64[::1], int32[::1], float32[::1], int64)")
def cut_to_choices(tokens, parents, probs, choices):
    """Drops nodes (T,) until the distinct tokens of all paths add up to at most `choices`.

    Paths with the most distinct tokens go first, of these the least frequent."""
    distinct = np.empty(len(tokens), dtype=np.int64)
    total = 0
    for node in range(len(tokens)):
        parent = same = parents[node]
        while same >= 0 and tokens[same] != tokens[node]:
            same = parents[same]
        distinct[node] = (distinct[parent] if parent >= 0 else 0) + (same < 0)
        total += distinct[node]
    kept = np.ones(len(tokens), dtype=np.bool_)
    # Parents come first and have no more distinct tokens, so none goes before its children.
    for largest in range(distinct.max() if len(tokens) else 0, 0, -1):
        for node in range(len(tokens) - 1, -1, -1):
            if total > choices and distinct[node] == largest:
                kept[node] = False
                total -= largest
    places = (np.cumsum(kept) - 1).astype(np.int32)
    moved = parents[kept]
    for node in range(len(moved)):
        moved[node] = places[moved[node]] if moved[node] >= 0 else -1
    return tokens[kept], moved, probs[kept]


def mixed_tree(
    texts: Sequence[IndexedText], context: np.ndarray, min_match: int, budget: int
) -> TreeArrays:
    """Grows a draft tree of what followed matches of several lengths of a context (n,).

    It takes, returns and raises what [`rest_tree`] does, and reads the longest match `FURTHER`
    times as far as `CONTINUATION_LENGTH`. See [`grow_trie`]."""
    matches, probs = mixed_matches(texts, context, min_match)
    quotas = [max(FEWEST_ROWS, int(MIXED_PLACES * (p / sum(probs)))) for p in probs]
    limits = [CONTINUATION_LENGTH * (1 if i else FURTHER) for i in range(len(matches))]
    return trie_tree(texts, matches, quotas, limits, budget, PSEUDO_COUNT)


def mixed_matches(
    texts: Sequence[IndexedText], context: np.ndarray, min_match: int
) -> tuple[list[Match], list[float]]:
    """The matches of a context (n,) that count, the longest first, and the probability of each."""
    matches: list[Match] = []
    probs = []
    left = 1.0  # for shorter matches
    for match in all_matches(texts, context, min_match):
        if left < LEAST_WEIGHT:
            break
        if not matches or match.count > matches[-1].count:  # else it has the same places
            matches.append(match)
            probs.append(left * (1 - PSEUDO_COUNT / (match.count + PSEUDO_COUNT)))
            left -= probs[-1]
    return matches, probs


def trie_tree(
    texts: Sequence[IndexedText],
    matches: Sequence[Match],
    quotas: Sequence[int],
    limits: Sequence[int],
    budget: int,
    pseudo_count: float,
) -> TreeArrays:
    """Reads the continuations of matches, the longest first, and grows a draft tree out of them."""
    if not matches:
        return np.empty(0, np.int64), np.empty(0, np.int32), np.empty(0, np.float32)
    plan = [
        (match.length, match.count, quota, limit)
        for match, quota, limit in zip(matches, quotas, limits, strict=True)
    ]
    # Each text has at least a row.
    room = sum(min(places, quota + len(texts)) for _, places, quota, _ in plan)
    read = Continuations.empty(room, max(limits))
    ranges = np.array([match.ranges for match in matches])
    plan_array = np.array(plan, dtype=np.int64)
    count = 0
    for i, text in enumerate(texts):
        count = sample_continuations(text, ranges[:, i], plan_array, count, read)
    read = Continuations(*(array[:count] for array in read))
    return grow_trie(read, len(matches), pseudo_count, budget)


class _Orders(NamedTuple):
    """The continuations, each a proposal of the growth, and room for the weight of each order."""

    read: Continuations
    pseudo_count: float
    weights: np.ndarray  # float64 of shape (orders,)
    numbers: np.ndarray  # int64 of shape (orders,)


@kernel(f"{TREE_TYPE}(Continuations, int64, float64, int64)")
def grow_trie(read, order_count, pseudo_count, budget):
    """Grows a draft tree from the continuations of several match lengths (orders, 0 the longest).

    At every node each order that still has continuations there estimates the next token by their
    frequencies. The longest with n continuations counts with probability n / (n + pseudo_count) and
    backs off to the next shorter one with the remainder, as prediction by partial matching does;
    the remainder of the shortest is lost, so that probabilities fall where little is known. With a
    pseudo-count of 0 the longest match alone decides. The best node comes first."""
    weights, numbers = np.empty(order_count, np.float64), np.empty(order_count, np.int64)
    found = _Orders(read, pseudo_count, weights, numbers)
    return _grow_orders(found, len(read.rows), len(read.rows), len(read.rows), budget, False)


@njit_no_alloc
def expand_orders(found, growth, first, node, depth, prob):
    """Proposes the tokens that follow a node, all orders mixed; returns their number."""
    following = growth.following
    weights = found.weights
    numbers = found.numbers
    rows, lengths, orders, occurrences = found.read
    # The weight of one place of each order at this node.
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
    row = first
    while row >= 0:
        growth.proposed[row] = rows[row, depth] if lengths[row] > depth else -1
        growth.weights[row] = prob * occurrences[row] * weights[orders[row]]
        row = following[row]
    return divide(growth, first, node)


_grow_orders = grower(expand_orders)
