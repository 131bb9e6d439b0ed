"""How often n-grams stand in a text, by one walk along its suffix array."""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import numpy as np

from .kernels import kernel


@kernel(
    "Tuple((uint8[::1], uint8[::1]))(uint16[::1], int32[::1], int64, int64)",
    "Tuple((uint8[::1], uint8[::1]))(uint32[::1], int32[::1], int64, int64)",
    drafts=False,
)
def common_prefixes(tokens, suffixes, vocab_size, longest):
    """Compares neighbouring suffixes, as far as the longest n-gram.

    Args:
        tokens, suffixes: A text and its suffix array.
        vocab_size: What is not below it separates documents.
        longest: The length of the longest n-gram.

    Returns:
        How many first tokens each suffix shares with the one before it, and how many of its first
        tokens are in one document.
    """
    shared = np.empty(len(suffixes), dtype=np.uint8)
    whole = np.empty(len(suffixes), dtype=np.uint8)
    before = -1
    for i in range(len(suffixes)):
        position = np.int64(suffixes[i])
        length = 0
        while (
            length < longest
            and position >= 0
            and position + length < len(tokens)
            and tokens[position + length] < vocab_size
        ):
            length += 1
        whole[i] = length
        same = 0
        while (
            before >= 0
            and same < length
            and before + same < len(tokens)
            and tokens[before + same] == tokens[position + same]
        ):
            same += 1
        shared[i] = same
        before = position
    return shared, whole


@kernel("int64(uint8[::1], uint8[::1], int64, int64, int64[::1], int64[::1])", drafts=False)
def frequent_runs(shared, whole, length, least, firsts, counts):
    """Finds the n-grams of one length that stand in a text often: runs of a suffix array.

    Args:
        shared, whole: From `common_prefixes`.
        length: n.
        least: The smallest number of occurrences that counts.
        firsts, counts: The index of each run's first suffix and its length are written here, as
            far as there is room.

    Returns:
        The number of such runs.
    """
    found, first = 0, 0
    for i in range(1, len(shared) + 1):
        if i < len(shared) and shared[i] >= length:
            continue
        if i - first >= least and whole[first] >= length:
            if found < len(firsts):
                firsts[found], counts[found] = first, i - first
            found += 1
        first = i
    return found
