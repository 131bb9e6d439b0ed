"""Suffix arrays: all places of given tokens in a long, fixed text, by binary search.

The suffix arrays of consecutive texts are merged into one of the whole, block by block. The
suffixes of a part keep their order in the whole, but for the last ones, whose first tokens reach
into the next part. These are sorted anew, as one more run to merge. Suffixes at even distances in
the parts cut all runs into blocks, which are merged in little memory, several at a time.

Suffixes are compared as far as `DEPTH` tokens (no match is longer), and equal ones keep the
order of their parts: a text that repeats itself (a document twice in the corpus, a million spaces)
would otherwise be compared over all of its length again and again. A part need only be in order as
far as its documents reach, since matches end there: others may have been cut out after them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np
from numba import njit
from pydivsufsort import divsufsort

from ..kernels.kernel import kernel, kernel_type
from ..threads import map_in_order

DAMAGED = (
    "the datastore is damaged: its suffix array and its tokens do not belong together; "
    "Datastore.verify() tells which file it is"
)
# The first tokens by which a suffix is sorted: no match is longer.
DEPTH = 128
# Lengths of a pattern that are searched for together: more overlap more waits for memory, fewer are
# searched for in vain.
TOGETHER = 4
# Suffixes merged at once, about.
BLOCK = 1 << 17
# Searches in a mapped file before it is mapped anew, which releases the pages read.
FORGET = 32
_RATIO = 0.6180339887498949
# The length of a part, and a function that returns its suffix array, int32.
Part: TypeAlias = tuple[int, Callable[[], np.ndarray]]


def build_suffix_array(tokens: np.ndarray) -> np.ndarray:
    """Sorts the suffixes of a text of n < 2**31 tokens (uint16 or uint32), a prefix first.

    Returns where each begins, int32 of shape `(n,)`."""
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

    Each document is followed by a separator, the largest number of the type."""

    tokens: np.ndarray  # uint16 or uint32, (n,)
    suffixes: np.ndarray  # int32, (n,)
    vocab_size: int  # all tokens but separators are below it

    @property
    def separator(self) -> int:
        """The token after each document."""
        return int(np.iinfo(self.tokens.dtype).max)

    @property
    def largest_id(self) -> int:
        """The largest token of a document, -1 without any; a ValueError if a suffix is outside."""
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


@njit
def _compare(tokens, position, context, begin):
    """Compares the text at `position` with `context[begin:]` (n,): 0 if it begins with that.

    It is negative if the text sorts before all that begin so, positive if after them."""
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
    """Finds all places of the last tokens of a context (n,) in a text, for all lengths.

    Returns of each length that occurs, the shortest first, the range in `suffixes`, its end
    exclusive: (m, 2). Nearly every step of a binary search waits for two far places in memory, the
    suffix and its tokens. Several searches that take their steps together wait for them at the same
    time."""
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
    """Copies the continuations of matches in one of several texts to `written`, from row `end` on.

    Returns how many rows there are then. A text is read in proportion to its matches, but at least
    once: what only a small text has is worth a row. If not all matches are read, those that are
    read are evenly spaced. A range is sorted by what follows, so each continuation is sampled in
    proportion to its occurrences, to within one.

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


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """The sorted suffixes of a part."""

    # Returns where each begins in its part, int32; called for every block, so that pages of a
    # mapped file can be released.
    suffixes: Callable[[], np.ndarray]
    start: int  # where the part begins and ends in the whole
    end: int
    settled: int  # suffixes that begin here or later in the part are left to another run

    def read(self, low: int, high: int) -> np.ndarray:
        """The run's settled suffixes (n,) from `low` to `high`, as positions in the whole."""
        suffixes = self.suffixes()[low:high]
        if len(suffixes) and not 0 <= suffixes.min() <= suffixes.max() < self.end - self.start:
            raise ValueError(DAMAGED)
        return suffixes[suffixes < self.settled] + np.int32(self.start)


def merge_suffixes(
    tokens: np.ndarray, parts: Sequence[Part], threads: int = 1
) -> Iterator[np.ndarray]:
    """Merges the suffix arrays of a text's parts in several threads, block by block.

    The text is uint16 or uint32, shorter than 2**31, and perhaps mapped from unchecked files.
    Yields the suffix array of the whole, int32 of shape `(n,)`."""
    runs = _runs(tokens, parts)
    bounds = _bounds(tokens, runs)

    def merge(block: tuple[Sequence[int], Sequence[int]]) -> np.ndarray:
        read = [run.read(low, high) for run, low, high in zip(runs, *block, strict=True)]
        ends = np.cumsum([len(suffixes) for suffixes in read], dtype=np.int64)
        return merge_runs(tokens, np.concatenate(read), ends, DEPTH)

    return map_in_order(merge, pairwise(bounds), threads)


def _runs(tokens: np.ndarray, parts: Sequence[Part]) -> list[Run]:
    """One run of each part of `tokens` (n,), and one of all suffixes not settled in them."""
    runs = []
    late = []
    start = 0
    for length, suffixes in parts:
        end = start + length
        settled = length if end == len(tokens) else max(length - DEPTH, 0)
        runs.append(Run(suffixes, start, end, settled))
        late.append(np.arange(start + settled, end, dtype=np.int32))
        start = end
    unsettled = np.concatenate(late)
    in_order = merge_runs(tokens, unsettled, np.arange(1, len(unsettled) + 1), DEPTH)
    return [*runs, Run(lambda: in_order, 0, len(tokens), len(tokens))]


def _bounds(tokens: np.ndarray, runs: list[Run]) -> list[list[int]]:
    """Where the blocks of `tokens` (n,) begin in each run, and where the last one ends."""
    big_endian = tokens.dtype.newbyteorder(">")
    separator = np.iinfo(tokens.dtype).max
    arrays = [run.suffixes() for run in runs]
    lengths = [len(array) for array in arrays]

    def beginning(number: int, index: int) -> bytes:
        """The first tokens of a suffix in its document and part, as bytes of the same order.

        They order all suffixes of a run, settled or not."""
        run = runs[number]
        place = int(arrays[number][index])
        if not 0 <= place < run.end - run.start:
            raise ValueError(DAMAGED)
        first = tokens[run.start + place : min(run.start + place + DEPTH, run.end)]
        first = first[: 1 + first.argmax()] if separator in first else first
        return first.astype(big_endian).tobytes()

    # Blocks begin elsewhere in each run (the golden ratio spreads them), or many runs of one size
    # would all be cut at about the same suffixes, and short ones nowhere.
    cuts = sorted(
        (beginning(number, index), number, index)
        for number, array in enumerate(arrays)
        for index in range(int(BLOCK * ((number + 1) * _RATIO % 1)), len(array), BLOCK)
        if array[index] < runs[number].settled
    )
    bounds = [[0] * len(runs)]
    for i, (cut, cut_run, cut_index) in enumerate(cuts):
        if i % FORGET == 0:
            arrays = [run.suffixes() for run in runs]
        places = []
        for number, length in enumerate(lengths):
            search = bisect_right if number < cut_run else bisect_left
            key = partial(beginning, number)
            places.append(cut_index if number == cut_run else search(range(length), cut, key=key))
        bounds.append(places)
    bounds.append(lengths)
    for lows, highs in pairwise(bounds):
        if any(low > high for low, high in zip(lows, highs, strict=True)):
            raise ValueError(DAMAGED)  # the suffixes are not in order
    return bounds


@njit
def _first_tokens(tokens, position):
    """The first of `tokens` (n,) of a suffix in 64 bits, which sort as they do; 0 after its end."""
    key = np.uint64(0)
    for i in range(position, position + 8 // tokens.itemsize):
        token = np.uint64(tokens[i]) if i < len(tokens) else np.uint64(0)
        key = key << np.uint64(8 * tokens.itemsize) | token
    return key


@njit
def _precedes(tokens, later, earlier, depth):
    """True if a suffix of `tokens` (n,) in a later run comes before one in an earlier run."""
    end = min(depth, len(tokens) - max(later, earlier))
    for i in range(end):
        if tokens[later + i] != tokens[earlier + i]:
            return tokens[later + i] < tokens[earlier + i]
    return end < depth and later > earlier  # a prefix of another suffix comes before it


@kernel(
    "int32[::1](uint16[::1], int32[::1], int64[::1], int64)",
    "int32[::1](uint32[::1], int32[::1], int64[::1], int64)",
    drafts=False,
)
def merge_runs(tokens, runs, ends, depth):
    """Merges sorted runs (m,) of suffixes, which end at `ends` (r,), two neighbours at a time.

    Suffixes that are equal in the first `depth` tokens, 8 or more, keep the order of their runs."""
    positions = runs.copy()
    new_positions = np.empty_like(runs)
    firsts = np.empty(len(runs), np.uint64)
    # A loop that does little else lets the processor wait for many memory accesses at a time.
    for i in range(len(runs)):
        firsts[i] = _first_tokens(tokens, np.int64(runs[i]))
    new_firsts = np.empty_like(firsts)
    bounds = np.zeros(len(ends) + 1, np.int64)
    bounds[1:] = ends
    count = len(ends)
    while count > 1:
        for pair in range((count + 1) // 2):
            i = bounds[2 * pair]
            middle = bounds[2 * pair + 1]
            end = bounds[min(2 * pair + 2, count)]
            j = middle
            for out in range(i, end):
                if i == middle or j == end:
                    takes_later = i == middle
                elif firsts[i] != firsts[j]:
                    takes_later = firsts[j] < firsts[i]
                else:
                    later, earlier = np.int64(positions[j]), np.int64(positions[i])
                    takes_later = _precedes(tokens, later, earlier, depth)
                taken = j if takes_later else i
                new_positions[out] = positions[taken]
                new_firsts[out] = firsts[taken]
                if takes_later:
                    j += 1
                else:
                    i += 1
            bounds[pair] = bounds[2 * pair]
        count = (count + 1) // 2
        bounds[count] = len(runs)
        positions, new_positions = new_positions, positions
        firsts, new_firsts = new_firsts, firsts
    return positions
