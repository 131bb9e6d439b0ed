"""Suffix arrays: all places of given tokens in a long, fixed text, by binary search."""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

import numpy as np
from numba import njit
from pydivsufsort import divsufsort

from ..kernels.kernel import kernel, kernel_type


def build_suffix_array(tokens: np.ndarray) -> np.ndarray:
    """Sorts the suffixes of a text of n < 2**31 tokens (uint16 or uint32), a prefix of another one
    before it; returns where each begins, int32 of shape `(n,)`."""
    # It sorts bytes, which have the order of the tokens only with the highest byte first. Three
    # bytes hold every token but the separator, which stays the largest.
    width = 2
    if tokens.dtype != np.uint16:
        largest = int(tokens.max(initial=0, where=tokens != np.iinfo(tokens.dtype).max))
        width = 3 if largest < 2**24 - 1 else 4
    columns = np.empty((len(tokens), width), dtype=np.uint8)
    for column in range(width):
        columns[:, column] = tokens >> (8 * (width - 1 - column)) & 0xFF
    byte_suffixes = divsufsort(columns.reshape(-1))
    del columns
    # Suffixes that begin with a token's highest byte; a part at a time saves memory.
    suffixes = np.empty(len(tokens), dtype=np.int32)
    end = 0
    for start in range(0, len(byte_suffixes), 1 << 20):
        part = byte_suffixes[start : start + (1 << 20)]
        part = part[part % width == 0] // width
        suffixes[end : end + len(part)] = part
        end += len(part)
    return suffixes


class IndexedText(NamedTuple):
    """A long text with its suffix array, both perhaps mapped from unchecked files.

    Each document is followed by a separator, the largest number of the type.
    """

    tokens: np.ndarray  # uint16 or uint32, (n,)
    suffixes: np.ndarray  # int32, (n,)
    vocab_size: int  # all tokens but separators are below it

    @property
    def separator(self) -> int:
        """The token after each document."""
        return int(np.iinfo(self.tokens.dtype).max)

    @property
    def largest_id(self) -> int:
        """The largest token of a document, -1 without any: suffixes are in order, and those that
        begin with a separator come last. Raises a ValueError if one points outside of the text."""
        try:
            end = bisect_left(self.suffixes, self.separator, key=self.tokens.__getitem__)
            return int(self.tokens[self.suffixes[end - 1]]) if end else -1
        except IndexError:
            raise ValueError(DAMAGED) from None


for _dtype in ("uint16", "uint32"):
    kernel_type(f"IndexedText_{_dtype}", IndexedText, f"{_dtype}[::1], int32[::1], int64")


class Continuations(NamedTuple):
    """The continuations of matches of several lengths (orders), a row for each place read."""

    rows: np.ndarray  # int32, (n, longest), the tokens
    lengths: np.ndarray  # int32, (n,), of each row; shorter where a document or the text ends
    orders: np.ndarray  # int32, (n,), the index of each row's match length
    occurrences: np.ndarray  # float64, (n,), how many places each row represents

    @classmethod
    def empty(cls, count: int, longest: int) -> Continuations:
        """Room for `count` rows of `longest` tokens."""
        rows = np.empty((count, longest), np.int32)
        lengths, orders = np.empty(count, np.int32), np.empty(count, np.int32)
        return cls(rows, lengths, orders, np.empty(count, np.float64))


kernel_type("Continuations", Continuations, "int32[:, ::1], int32[::1], int32[::1], float64[::1]")


DAMAGED = (
    "the datastore is damaged: its suffix array and its tokens do not belong together; "
    "Datastore.verify() tells which file it is"
)
# How many first tokens of a suffix it is sorted by: no match is longer.
DEPTH = 128
# Lengths of a pattern that are searched for together: more overlap more waits for memory, fewer are
# searched for in vain.
TOGETHER = 4


@njit
def _compare(tokens, position, context, begin):
    """Negative if the text at `position` sorts before all texts that begin with `context[begin:]`
    (n,), 0 if it begins with that, positive if it sorts after them."""
    for i in range(len(context) - begin):
        if position + i >= len(tokens):
            return -1
        difference = np.int64(tokens[position + i]) - context[begin + i]
        if difference != 0:
            return difference
    return 0


_FIND = "int64[:, ::1](IndexedText_{}, int32[::1], int64)"


@kernel(_FIND.format("uint16"), _FIND.format("uint32"))
def find_suffixes(text, context, min_match):
    """Finds all places of the last tokens of a context (n,) in a text, for all lengths: of each
    length that occurs, the range in `suffixes`, its end exclusive, the shortest first: (m, 2).

    Nearly every step of a binary search waits for two far places in memory, the suffix and its
    tokens. Several searches that take their steps together wait for them at the same time."""
    tokens, suffixes = text.tokens, text.suffixes
    total = max(len(context) - min_match + 1, 0)
    ranges = np.empty((total, 2), dtype=np.int64)
    # For each length the first suffix that begins with the pattern and the first one after these.
    lows = np.empty(2 * TOGETHER, dtype=np.int64)
    highs = np.empty(2 * TOGETHER, dtype=np.int64)
    positions = np.empty(2 * TOGETHER, dtype=np.int64)
    found = 0
    while found < total:
        searches = 2 * min(TOGETHER, total - found)
        for i in range(searches):
            lows[i], highs[i] = 0, len(suffixes)
        searching = len(suffixes) > 0
        while searching:
            searching = False
            for i in range(searches):
                # A search that has ended reads any place.
                positions[i] = suffixes[min((lows[i] + highs[i]) // 2, len(suffixes) - 1)]
            for i in range(searches):
                if lows[i] == highs[i]:
                    continue
                if positions[i] < 0 or positions[i] >= len(tokens):
                    raise ValueError(DAMAGED)
                middle = (lows[i] + highs[i]) // 2
                begin = len(context) - (min_match + found + i // 2)
                order = _compare(tokens, positions[i], context, begin)
                if order < 0 or (order == 0 and i % 2 == 1):
                    lows[i] = middle + 1
                else:
                    highs[i] = middle
                searching = True
        for i in range(0, searches, 2):
            # In a damaged array the one search may end before the other.
            if lows[i] >= lows[i + 1]:
                return ranges[:found]
            ranges[found, 0], ranges[found, 1] = lows[i], lows[i + 1]
            found += 1
    return ranges


_SAMPLE = "int64(IndexedText_{}, int64[:, :], int64[:, ::1], int64, Continuations)"


@kernel(_SAMPLE.format("uint16"), _SAMPLE.format("uint32"))
def sample_continuations(text, ranges, plan, end, written):
    """Copies the continuations of matches of several lengths in one of several texts to `written`,
    from row `end` on; returns how many rows there are then.

    It reads a text in proportion to its matches, but at least once: what only a small text has is
    worth a row. If it does not read all matches, those that it reads are evenly spaced. A range is
    sorted by what follows, so each continuation is sampled in proportion to its occurrences, to
    within one.

    `ranges` (m, 2) is where in the suffix array the matches of each length are. `plan` (m, 4) has
    for each length the number of tokens that match, of places in all texts, of these that are read
    (about), and of tokens read at each place, at least 1."""
    tokens, suffixes, vocab_size = text
    rows, lengths, orders, occurrences = written
    separator = np.iinfo(tokens.dtype).max
    positions = np.empty(len(rows), dtype=np.int64)
    # Nearly every access waits for memory, and in a loop that does little else for many accesses at
    # a time: so first all positions are read, then the first token of each, and then whole rows.
    # (Without the second loop a sample of a datastore in memory takes an eighth to a half longer.)
    for i in range(len(ranges)):
        low, high = ranges[i]
        matched, all_places, quota, limit = plan[i]
        count = min(high - low, max((high - low) * quota // max(all_places, 1), 1))
        for row in range(end, end + count):
            suffix = low + (2 * (row - end) + 1) * (high - low) // (2 * count)
            positions[row] = suffixes[suffix]
            orders[row], occurrences[row] = i, (high - low) / count
        for row in range(end, end + count):
            if positions[row] < 0 or positions[row] >= len(tokens):
                raise ValueError(DAMAGED)
            positions[row] += matched
            rows[row, 0] = np.int32(tokens[min(positions[row], len(tokens) - 1)])
        for row in range(end, end + count):
            position = positions[row]
            length = 0
            while length < min(limit, len(tokens) - position):
                token = tokens[position + length]
                if token >= vocab_size:
                    if token == separator:
                        break
                    raise ValueError(DAMAGED)
                rows[row, length] = token
                length += 1
            lengths[row] = length
        end += count
    return end
