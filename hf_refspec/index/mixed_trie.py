"""A draft tree mixed from matches of several lengths: a long match that is rare is a poor witness.

It goes beyond REST (rest_trie.py), whose longest match decides alone, by prediction by partial
matching (Cleary and Witten, 1984): each length backs off to the next shorter one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .draft_tree import TreeArrays
from .rest_trie import Match, all_matches, trie_tree
from .suffix_array import IndexedText

# So many continuations of a match count as much as all shorter matches together: the more, the
# less is a rare long match trusted.
PSEUDO_COUNT = 30.0
# A match that would count with a smaller probability is not looked for: time against little.
LEAST_WEIGHT = 0.02
# Continuations that are read of a match, however little it counts: below, chance would decide.
FEWEST_ROWS = 16
# Where the longest match leaves no choice, its continuation goes on so many times further: longer
# drafts of copied text, against reading more of every one.
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

    Args, result and errors are those of [`rest_tree`]; the continuations of the longest match are
    read 3 times as far as `continuation_length`, for the case that they leave no choice.
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
    """The longest match and the shorter ones that count beside it, longest first.

    Arguments as of [`all_matches`].
    """
    matches: list[Match] = []
    left = 1.0
    for match in all_matches(texts, context, min_match):
        if left < LEAST_WEIGHT:
            break
        if not matches or match.count > matches[-1].count:  # else it stands in the same places
            matches.append(match)
            left *= _backed_off(match)
    return matches


def _backed_off(match: Match) -> float:
    """The probability that a match leaves to shorter ones."""
    return PSEUDO_COUNT / (match.count + PSEUDO_COUNT)
