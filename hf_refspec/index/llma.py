"""Drafts copied from places of a text that agree with the last tokens.

`llma_span` is LLMA's ("Inference with Reference: Lossless Acceleration of Large Language Models",
arXiv 2304.04487, section 2.2): one span, from the place of the longest match. `copy_tree` goes
beyond it: a tree of all matches.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..kernels.kernel import kernel
from .best_first import TREE_TYPE, divide, grower, njit_no_alloc, no_tree
from .token_buffer import LinkedText, common_suffix, latest_of

# A longer match predicts no better than one of this length, and takes longer to compare.
LONGEST_MATCH = 16
# Matches of each length that are kept at the root, and matches that join at a deeper node: the
# latest ones. More took time and did not draft better.
MATCHES_KEPT = 64
# Occurrences of one token that are compared, latest first, at the root and at another node: a bound
# on the time in a text of millions of tokens, or of one token over and over.
ROOT_OCCURRENCES = 1 << 15
NODE_OCCURRENCES = 128
# Nodes with room for matches to join: a bound on the memory of a huge draft.
MATCHED_NODES = 256
# The length of a match up to the last token but one, where the target may have replaced the last:
# less than 1, the length of a single equal token.
SKIP_LENGTH = 0.5
# Copying resumes near where it broke off: matches up to NEAR tokens after the last place that
# agreed with at least ANCHOR_LENGTH tokens weigh NEAR_FACTOR times as much as others.
ANCHOR_LENGTH = 6
NEAR = 32
NEAR_FACTOR = 3.0


@kernel("Tuple((int64, int32[:]))(LinkedText, int32[::1], int64, int64)")
def llma_span(text, context, match_length, copy_length):
    """Copies tokens after the first place of the longest suffix of a context (n,) in references.

    The suffix has at least `match_length` tokens, the span (k,) at most `copy_length`, and it ends
    with its reference, which ends with a boundary. Returns where the span begins, and the span."""
    tokens = text.tokens
    start = len(tokens)
    longest = match_length
    position = latest_of(text, context[-1])
    while position >= 0:
        followed = position + 1 < len(tokens) and tokens[position + 1] >= 0
        length = common_suffix(tokens, position, context, 0) if followed else 0
        if length >= longest:
            start = position + 1
            longest = length
        position = text.previous[position]
    end = start
    while end < min(start + copy_length, len(tokens)) and tokens[end] >= 0:
        end += 1
    return start, tokens[start:end]


class _Matches(NamedTuple):
    """The matches, each a proposal of the growth, and the text and context that they match."""

    text: LinkedText
    last: int  # the last token before the draft
    anchor: int
    join: bool  # whether a match of one token may draft
    copy_length: int
    positions: np.ndarray  # int32, where in the text is what each match proposes
    lengths: np.ndarray  # float64
    number: np.ndarray  # int64 of shape (1,), how many matches there are so far


@kernel(f"Tuple(({TREE_TYPE}, int64))(LinkedText, int32[::1], int64, int64, int64, boolean, int64)")
def copy_tree(text, context, budget, match_length, copy_length, chain, anchor):
    """Grows a draft tree from all matches of a context (n,), best node first.

    Returns it with the new anchor. A match is a place after tokens that equal the last tokens of
    the path to a node; it proposes the token at that place for a child. A match of length l weighs
    l ** 3 (and more near the anchor, the last place that was copied from for long, -1 for
    none). With L the longest match at a node, one of the children is accepted with probability L /
    (L + 1), after Laplace's rule of succession: a copy that held for L tokens. The children divide
    it by the weight of their matches.

    A match goes down with the child that it proposes, one longer. Other occurrences of the child's
    token join it there with length 1, if matches so short may draft: `match_length` is the shortest
    that counts, `copy_length` the longest path."""
    if latest_of(text, context[-1]) < 0 and (
        len(context) < 2 or latest_of(text, context[-2]) < 0
    ):  # the usual case where nothing repeats: it must cost nothing
        return no_tree(), anchor
    at_root = min(MATCHES_KEPT * len(context), len(text.tokens))
    capacity = 2 * at_root + MATCHES_KEPT * min(budget, MATCHED_NODES)
    positions = np.empty(capacity, dtype=np.int32)
    lengths = np.empty(capacity, dtype=np.float64)
    count = 0
    longest = ANCHOR_LENGTH - 1
    for skipped in range(2):
        kept = np.zeros(len(context) + 1, dtype=np.int32)  # how many of each length
        count, place, length = _root_matches(
            text, context, skipped, match_length, positions, lengths, kept, count
        )
        if length > longest:
            anchor = place
            longest = length
    join = match_length == 1
    number = np.full(1, count)
    found = _Matches(text, context[-1], anchor, join, copy_length, positions, lengths, number)
    return _grow_matches(found, count, capacity, capacity, budget, chain), anchor


@njit_no_alloc
def _root_matches(text, context, skipped, match_length, positions, lengths, kept, count):
    """Appends the matches of a context (n,) without its last `skipped` (0 or 1) tokens.

    The latest come first. Returns the number of matches now, and the longest of the new ones: its
    position and its length."""
    tokens = text.tokens
    longest_position = -1
    longest = 0
    if len(context) <= skipped:
        return count, longest_position, longest
    occurrence = latest_of(text, context[-1 - skipped])
    for _ in range(ROOT_OCCURRENCES):
        # Once there are enough of the greatest length, nothing better is to come.
        if occurrence < 0 or kept[len(context) - skipped] == MATCHES_KEPT:
            break
        position = occurrence + 1 + skipped
        usable = position < len(tokens) and tokens[position] >= 0 and tokens[position - 1] >= 0
        if skipped and usable:  # otherwise it is a match without skipping
            usable = tokens[position - 1] != context[-1]
        length = common_suffix(tokens, occurrence, context, skipped) if usable else 0
        occurrence = text.previous[occurrence]
        if length < max(match_length, 1 + skipped) or kept[length] == MATCHES_KEPT:
            continue
        kept[length] += 1
        positions[count] = position
        lengths[count] = SKIP_LENGTH if skipped else length
        count += 1
        if length > longest:
            longest_position = position
            longest = length
    return count, longest_position, longest


@njit_no_alloc
def expand_matches(found, growth, first, node, depth, prob):
    """Proposes the tokens that follow the matches of a node; returns their number."""
    if depth == found.copy_length:
        return 0
    if node >= 0:
        _advance(found, growth, first, node)
    tokens = found.text.tokens
    weights = growth.weights
    match = first
    total = 0.0
    longest = 0.0
    while match >= 0:
        position = found.positions[match]
        if position < len(tokens) and tokens[position] >= 0:
            weight = found.lengths[match] ** 3
            if found.anchor >= 0 and 0 <= position - found.anchor < NEAR:
                weight *= NEAR_FACTOR
            total += weight
            longest = max(longest, found.lengths[match])
            growth.proposed[match] = tokens[position]
            weights[match] = weight
        else:
            growth.proposed[match] = -1
        match = growth.following[match]
    count = divide(growth, first, node)
    for child in growth.children[:count]:
        weights[child] = prob * weights[child] / total * longest / (longest + 1.0)
    return count


_grow_matches = grower(expand_matches)


@njit_no_alloc
def _advance(found, growth, first, node):
    """Moves the matches of a new node past its token, and adds other occurrences of the token.

    Occurrences after its parent's token are among its matches already."""
    text = found.text
    positions = found.positions
    lengths = found.lengths
    following = growth.following
    match = first
    while match >= 0:
        positions[match] += 1
        lengths[match] += 1.0
        match = following[match]
    if not found.join:
        return
    parent = growth.parents[node]
    before = growth.tokens[parent] if parent >= 0 else found.last
    occurrence = text.latest[growth.tokens[node]]
    joined = 0
    count = found.number[0]
    for _ in range(NODE_OCCURRENCES):
        if occurrence < 0 or joined == MATCHES_KEPT or count == len(positions):
            break
        if occurrence == 0 or text.tokens[occurrence - 1] != before:
            positions[count], lengths[count] = occurrence + 1, 1.0
            following[count] = following[first]
            following[first] = count
            count += 1
            joined += 1
        occurrence = text.previous[occurrence]
    found.number[0] = count
