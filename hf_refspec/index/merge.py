"""Merges the suffix arrays of consecutive texts into one of the whole, block by block.

The suffixes of a part keep their order in the whole, but for the last ones, whose first tokens
reach into the next part. These are sorted anew, as one more run to merge. Suffixes at even
distances in the parts cut all runs into blocks, which are merged in little memory, several at a
time.

Suffixes are compared as far as `DEPTH` tokens (no match is longer), and equal ones keep the
order of their parts: a text that repeats itself (a document twice in the corpus, a million spaces)
would otherwise be compared over all of its length again and again. A part need only be in order as
far as its documents reach, since matches end there: others may have been cut out after them.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numba import njit

from ..kernels.kernel import kernel
from .suffix_array import DAMAGED, DEPTH

# Suffixes merged at once, about.
BLOCK = 1 << 17
# Searches in a mapped file before it is mapped anew, which releases the pages read.
FORGET = 32
_RATIO = 0.6180339887498949

# The length of a part, and a function that returns its suffix array, int32.
Part: TypeAlias = tuple[int, Callable[[], np.ndarray]]


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
    """Merges the suffix arrays of the parts of a text (uint16 or uint32, shorter than 2**31),
    perhaps mapped from unchecked files, in several threads; yields the suffix array of the whole,
    int32 of shape `(n,)`, block by block."""
    runs = _runs(tokens, parts)
    bounds = _bounds(tokens, runs)

    def merge(lows: Sequence[int], highs: Sequence[int]) -> np.ndarray:
        read = [run.read(low, high) for run, low, high in zip(runs, lows, highs, strict=True)]
        ends = np.cumsum([len(suffixes) for suffixes in read], dtype=np.int64)
        return merge_runs(tokens, np.concatenate(read), ends, DEPTH)

    with ThreadPoolExecutor(threads) as pool:
        pending: deque[Future[np.ndarray]] = deque()
        for lows, highs in pairwise(bounds):
            pending.append(pool.submit(merge, lows, highs))
            if len(pending) > 2 * threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


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
        """The first tokens of a suffix, as bytes of the same order; only those in its part and
        its document, which order all suffixes of a run, settled or not."""
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
    """Merges sorted runs (m,) of suffixes, which end at `ends` (r,), two neighbours at a time; of
    suffixes that are equal in the first `depth` tokens, 8 or more, the earlier run's comes
    first."""
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
