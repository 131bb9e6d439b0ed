"""Suffix arrays: all places in a long, fixed text where given tokens stand, by binary search."""

# mypy: disallow-untyped-defs=False
# The types of a kernel's arguments are those of its numba signatures.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numba import njit

from .kernels import kernel


def build_suffix_array(tokens: np.ndarray) -> np.ndarray:
    """Sorts the suffixes of a text; one that is the beginning of another stands before it.

    Args:
        tokens (`np.ndarray`, uint16 or uint32 of shape `(n,)`): The text, n < 2**31.

    Returns:
        `np.ndarray`: int32 of shape `(n,)`, where each suffix begins.

    Raises:
        ImportError: If pydivsufsort is not installed.
    """
    divsufsort = suffix_sorter()
    # It sorts bytes. Only with the highest byte first are these in the order of the tokens; three
    # bytes hold every token that is not the separator, which stays the largest.
    width = 2 if tokens.dtype == np.uint16 else 3 if _fits_three_bytes(tokens) else 4
    columns = np.empty((len(tokens), width), dtype=np.uint8)
    for column in range(width):
        columns[:, column] = tokens >> (8 * (width - 1 - column)) & 0xFF
    byte_suffixes = divsufsort(columns.reshape(-1))
    del columns
    # Only the suffixes that begin with a token's highest byte; a part at a time saves memory.
    suffixes, end = np.empty(len(tokens), dtype=np.int32), 0
    for start in range(0, len(byte_suffixes), 1 << 20):
        part = byte_suffixes[start : start + (1 << 20)]
        part = part[part % width == 0] // width
        suffixes[end : end + len(part)] = part
        end += len(part)
    return suffixes


def suffix_sorter() -> Callable[[np.ndarray], np.ndarray]:
    """The function of pydivsufsort that sorts the suffixes of bytes.

    Raises:
        ImportError: If it is not installed.
    """
    try:
        from pydivsufsort import divsufsort  # part of the extras `datastore` and `retrieval`
    except ImportError:
        raise ImportError(
            "suffix arrays need pydivsufsort: pip install hf_refspec[datastore]"
        ) from None
    return divsufsort


def _fits_three_bytes(tokens: np.ndarray) -> bool:
    separator = np.iinfo(tokens.dtype).max
    return int(tokens.max(initial=0, where=tokens != separator)) < 2**24 - 1


@dataclass(frozen=True, slots=True, eq=False)
class IndexedText:
    """A long text with its suffix array, both perhaps mapped from files that nobody has checked.

    Attributes:
        tokens (`np.ndarray`, uint16 or uint32 of shape `(n,)`): Documents, each with a separator,
            the largest number of the type, behind it.
        suffixes (`np.ndarray`, int32 of shape `(n,)`): The suffix array.
        vocab_size (`int`): The tokens are below it, but for the separators.
    """

    tokens: np.ndarray
    suffixes: np.ndarray
    vocab_size: int

    @property
    def separator(self) -> int:
        """What stands between documents."""
        return int(np.iinfo(self.tokens.dtype).max)

    def find(self, pattern: np.ndarray) -> tuple[int, int]:
        """Finds all places of a pattern.

        Args:
            pattern (`np.ndarray`, int32 of shape `(m,)`): At least one token.

        Returns:
            `tuple[int, int]`: The range in the suffix array, its end exclusive.

        Raises:
            ValueError: If the suffix array points outside of the text.
        """
        low, high = find_range(self.tokens, self.suffixes, pattern)
        if low < 0:
            raise ValueError(_DAMAGED)
        return low, high

    def sample(
        self, low: int, high: int, match_length: int, rows: np.ndarray, lengths: np.ndarray
    ) -> None:
        """Copies what follows the matches of a range into `rows`, see [`sample_continuations`].

        Raises:
            ValueError: If the suffix array points outside of the text, or the text has a token
                outside of the vocabulary.
        """
        if not sample_continuations(
            self.tokens,
            self.suffixes,
            low,
            high,
            match_length,
            self.vocab_size,
            self.separator,
            rows,
            lengths,
        ):
            raise ValueError(_DAMAGED)


_DAMAGED = (
    "the datastore is damaged: its suffix array and its tokens do not belong together; "
    "Datastore.verify() tells which file it is"
)


@njit
def _compare(tokens, position, pattern):
    """Negative if the text at `position` sorts before all texts that begin with `pattern`, 0 if it
    begins with it, positive if it sorts after them."""
    for i in range(len(pattern)):
        if position + i >= len(tokens):
            return -1
        difference = np.int64(tokens[position + i]) - pattern[i]
        if difference != 0:
            return difference
    return 0


@njit
def _bisect(tokens, suffixes, pattern, low, high, least):
    """The first index from `low` to `high` whose suffix does not compare below `least`.

    -1 if a suffix begins outside of the text, as only a damaged file has it.
    """
    while low < high:
        middle = (low + high) // 2
        position = suffixes[middle]
        if position < 0 or position >= len(tokens):
            return -1
        if _compare(tokens, position, pattern) < least:
            low = middle + 1
        else:
            high = middle
    return low


@kernel(
    "UniTuple(int64, 2)(uint16[::1], int32[::1], int32[::1])",
    "UniTuple(int64, 2)(uint32[::1], int32[::1], int32[::1])",
)
def find_range(tokens, suffixes, pattern):
    """Finds all places where `pattern` stands in a text.

    Args:
        tokens, suffixes: The text and its suffix array.
        pattern: Tokens, at least one.

    Returns:
        The range in `suffixes`, its end exclusive; (-1, -1) if the array is damaged.
    """
    low = _bisect(tokens, suffixes, pattern, 0, len(suffixes), 0)
    if low < 0:
        return -1, -1
    # Most patterns stand nowhere or in few places: steps that double find the end sooner.
    step, high = 1, low
    while high < len(suffixes):
        position = suffixes[high]
        if position < 0 or position >= len(tokens):
            return -1, -1
        if _compare(tokens, position, pattern) > 0:
            break
        step *= 2
        high = min(low + step, len(suffixes))
    high = _bisect(tokens, suffixes, pattern, low, high, 1)
    return (low, high) if high >= 0 else (-1, -1)


@kernel(
    "boolean(uint16[::1], int32[::1], int64, int64, int64, int64, int64, int32[:, ::1],int32[::1])",
    "boolean(uint32[::1], int32[::1], int64, int64, int64, int64, int64, int32[:, ::1],int32[::1])",
)
def sample_continuations(
    tokens, suffixes, low, high, match_length, vocab_size, separator, rows, lengths
):
    """Copies what follows the matches in a range of a suffix array.

    Of more matches than there are rows it takes evenly spaced ones. The range is sorted by what
    follows, so that each continuation is taken as often as is its due, to within one.

    Args:
        tokens, suffixes: The text and its suffix array.
        low, high: The range, at least as long as there are rows.
        match_length: The length of the pattern that was searched.
        vocab_size, separator: Tokens are below the one, the other ends a document.
        rows: int32 of shape (rows, longest continuation), written here.
        lengths: How many tokens of each row there are until the document (or the text) ends.

    Returns:
        Whether all was well; otherwise the arrays are damaged.
    """
    # Nearly every place read is far from the others. Loops that do nothing else let the processor
    # wait for many of them at a time.
    count = len(rows)
    positions = np.empty(count, dtype=np.int64)
    for row in range(count):
        positions[row] = suffixes[low + (2 * row + 1) * (high - low) // (2 * count)]
    for row in range(count):
        if positions[row] < 0 or positions[row] >= len(tokens):
            return False
        positions[row] += match_length
        lengths[row] = tokens[min(positions[row], len(tokens) - 1)] & 1
    for row in range(count):
        length = 0
        position = positions[row]
        while length < rows.shape[1] and position + length < len(tokens):
            token = tokens[position + length]
            if token >= vocab_size:
                if token == separator:
                    break
                return False
            rows[row, length] = token
            length += 1
        lengths[row] = length
    return True
