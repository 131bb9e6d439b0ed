"""A draft tree mixed from matches of several lengths: a long but rare match is a poor witness.

In REST (rest_trie.py) the longest match alone decides. Here each length backs off to the next
shorter one: prediction by partial matching (Cleary and Witten, 1984).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .draft_tree import TreeArrays
from .rest_trie import Match, all_matches, trie_tree
from .suffix_array import IndexedText

# The number of continuations at which a match counts as much as all shorter ones together: the
# larger, the less a rare long match is trusted.
PSEUDO_COUNT = 30.0
# Matches that would count with a smaller probability are not worth the search.
LEAST_WEIGHT = 0.02
# Continuations read of a match, however little it counts: with fewer, chance would decide.
FEWEST_ROWS = 16
# How much further the longest match is read, in case it leaves no choice: longer drafts of copied
# text, at the price of more reading in every draft.
FURTHER = 3


def mixed_tree(
    texts: Sequence[IndexedText],
    context: np.ndarray,
    min_match: int,
    budget: int,
    max_continuations: int,
    continuation_length: int,
) -> TreeArrays:
    """Grows a draft tree out of what followed matches of several lengths, see [`grow_trie`].

    It takes, returns and raises what [`rest_tree`] does, and reads the longest match `FURTHER`
    times as far as `continuation_length`.
    """
    matches = mixed_matches(texts, context, min_match)
    weights, left = [], 1.0
    for match in matches:
        weights.append(left * (1 - _backed_off(match)))
        left -= weights[-1]
    quotas = [max(FEWEST_ROWS, int(max_continuations * each / sum(weights))) for each in weights]
    limits = [continuation_length * (1 if i else FURTHER) for i in range(len(matches))]
    return trie_tree(texts, matches, quotas, limits, budget, PSEUDO_COUNT)


def mixed_matches(texts: Sequence[IndexedText], context: np.ndarray, min_match: int) -> list[Match]:
    """The longest match and the shorter ones that count beside it, the longest first."""
    matches: list[Match] = []
    left = 1.0
    for match in all_matches(texts, context, min_match):
        if left < LEAST_WEIGHT:
            break
        if not matches or match.count > matches[-1].count:  # else it has the same places
            matches.append(match)
            left *= _backed_off(match)
    return matches


def _backed_off(match: Match) -> float:
    """The probability that a match leaves to shorter ones."""
    return PSEUDO_COUNT / (match.count + PSEUDO_COUNT)
