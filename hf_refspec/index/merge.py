"""Merges suffix arrays of texts that follow each other into that of the whole, block by block.

The suffixes of each part are sorted already and keep their order in the whole, but for the last
ones: what they begin with ends in the next part. These are sorted anew, and are one more run to
merge. Suffixes at even distances in the parts cut all runs into blocks; each is merged by itself,
in little memory, several at a time.

Suffixes are compared as far as `DEPTH` tokens; of equal ones that of the earlier part comes first.
No match is longer, and a text that repeats itself (a document that the corpus has twice, a million
spaces) would otherwise be compared over all of its length again and again.
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

import numpy as np
from numba import njit

from .kernels import kernel
from .suffix_array import DAMAGED, DEPTH

# About so many suffixes are merged at once.
BLOCK = 1 << 17
# After so many searches in a mapped file it is mapped anew: what has been read is forgotten.
FORGET = 32
# So many tokens are compared at once.
STRIDE = 32


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Suffixes in their order, which are merged with those of other runs.

    Attributes:
        suffixes (`Callable`): Returns where each begins in its part, int32 of shape `(n,)`. It is
            asked anew for every block: what has been read of a mapped file can be forgotten.
        start, end (`int`): Where the part begins and ends in the whole.
        settled (`int`): Suffixes of the part that begin here or later are not of the run, though
            they stand among those that are.
    """

    suffixes: Callable[[], np.ndarray]
    start: int
    end: int
    settled: int

    def read(self, low: int, high: int) -> np.ndarray:
        """Those of the run that stand from `low` to `high`, int32, as positions in the whole."""
        suffixes = self.suffixes()[low:high]
        if len(suffixes) and not 0 <= suffixes.min() <= suffixes.max() < self.end - self.start:
            raise ValueError(DAMAGED)
        return suffixes[suffixes < self.settled] + np.int32(self.start)


def merge_suffixes(
    tokens: np.ndarray,
    parts: Sequence[tuple[int, Callable[[], np.ndarray]]],
    threads: int = 1,
    block: int = BLOCK,
    depth: int = DEPTH,
) -> Iterator[np.ndarray]:
    """Merges the suffix arrays of the parts of a text.

    Args:
        tokens (`np.ndarray`, uint16 or uint32 of shape `(n,)`): The text, n < 2**31.
        parts (sequence of `tuple[int, Callable]`): The length of each part, and what returns its
            suffix array, int32. Both may be mapped from files that nobody has checked.
        threads (`int`, *optional*, defaults to 1): How many blocks are merged at a time.
        block (`int`, *optional*): About how many suffixes a block has.
        depth (`int`, *optional*): How many tokens of a suffix count, 8 or more.

    Yields:
        The suffix array of the text, int32, block by block.

    Raises:
        ValueError: If a suffix array points outside of its part.
    """
    runs = _runs(tokens, parts, depth)
    bounds = _bounds(tokens, runs, block, depth)

    def merge(lows: Sequence[int], highs: Sequence[int]) -> np.ndarray:
        read = [run.read(low, high) for run, low, high in zip(runs, lows, highs, strict=True)]
        ends = np.cumsum([len(suffixes) for suffixes in read], dtype=np.int64)
        return merge_runs(tokens, np.concatenate(read), ends, depth)

    with ThreadPoolExecutor(threads) as pool:
        begun: deque[Future[np.ndarray]] = deque()
        for lows, highs in pairwise(bounds):
            begun.append(pool.submit(merge, lows, highs))
            if len(begun) > 2 * threads:
                yield begun.popleft().result()
        while begun:
            yield begun.popleft().result()


def _runs(
    tokens: np.ndarray, parts: Sequence[tuple[int, Callable[[], np.ndarray]]], depth: int
) -> list[Run]:
    """One run of each part, and one of what is not settled in them."""
    runs, late, start = [], [], 0
    for length, suffixes in parts:
        end = start + length
        settled = length if end == len(tokens) else max(length - depth, 0)
        runs.append(Run(suffixes, start, end, settled))
        late.append(np.arange(start + settled, end, dtype=np.int32))
        start = end
    unsettled = np.concatenate(late)
    in_order = merge_runs(tokens, unsettled, np.arange(1, len(unsettled) + 1), depth)
    return [*runs, Run(lambda: in_order, 0, len(tokens), len(tokens))]


def _bounds(tokens: np.ndarray, runs: list[Run], block: int, depth: int) -> list[list[int]]:
    """Where the blocks begin in each run, and where the last one ends."""
    big_endian = tokens.dtype.newbyteorder(">")
    arrays = [run.suffixes() for run in runs]
    lengths = [len(array) for array in arrays]

    def beginning(number: int, index: int) -> bytes:
        """What a suffix begins with, in an order that bytes have as well; no more than its part
        has of it, by which the suffixes of a run stand in order whether they are settled or not."""
        run, place = runs[number], int(arrays[number][index])
        if not 0 <= place < run.end - run.start:
            raise ValueError(DAMAGED)
        first = tokens[run.start + place : min(run.start + place + depth, run.end)]
        return first.astype(big_endian).tobytes()

    cuts = sorted(
        (beginning(number, index), number, index)
        for number, array in enumerate(arrays)
        for index in range(_first_cut(number, block), len(array), block)
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
            raise ValueError(DAMAGED)  # its suffixes do not stand in order
    return bounds


def _first_cut(number: int, block: int) -> int:
    """Where the first block of a run ends: elsewhere in each, for else many runs of one size would
    all be cut at about the same suffixes, and short ones nowhere."""
    return int(block * ((number + 1) * 0.6180339887498949 % 1))  # the golden ratio spreads them


@njit
def _first_tokens(tokens, position):
    """The first tokens of a suffix in 64 bits, which sort as they do; 0 behind the text."""
    key = np.uint64(0)
    for i in range(position, position + 8 // tokens.itemsize):
        token = np.uint64(tokens[i]) if i < len(tokens) else np.uint64(0)
        key = key << np.uint64(8 * tokens.itemsize) | token
    return key


@njit
def _common(tokens, one, other, start, depth):
    """How many first tokens two suffixes have in common that have `start` in common."""
    end = min(depth, len(tokens) - max(one, other))
    while start < end:
        count = min(STRIDE, end - start)
        # Without a way out of this loop it becomes a few vector instructions.
        differences = 0
        i, j = np.uint64(one + start), np.uint64(other + start)
        for k in range(np.uint64(count)):
            differences += tokens[i + k] != tokens[j + k]
        if differences > 0:
            while tokens[one + start] == tokens[other + start]:
                start += 1
            return start
        start += count
    return end


@njit
def _common_bits(one, other):
    """How many first bits two different numbers of 64 bits have in common."""
    common, difference = 0, one ^ other
    while difference >> np.uint64(63 - common) == 0:
        common += 1
    return common


@kernel(
    "int32[::1](uint16[::1], int32[::1], int64[::1], int64)",
    "int32[::1](uint32[::1], int32[::1], int64[::1], int64)",
    drafts=False,
)
def merge_runs(tokens, runs, ends, depth):
    """Merges sorted runs of suffixes, two neighbours at a time.

    Beside each suffix stands what it has in common with the one before it (Ng and Kakehi, "Merging
    String Sequences by Longest Common Prefixes", 2008). Of two that could come next, the one that
    has more in common with the last one does; only if both have the same are they compared, from
    there on. So hardly any token is read twice, however much the suffixes are alike.

    Args:
        tokens: The text.
        runs: Positions in it, one run after another.
        ends: Where each run ends.
        depth: How many tokens of a suffix count.

    Returns:
        The positions in order; of equal suffixes that of the earlier run first.
    """
    positions, new_positions = runs.copy(), np.empty_like(runs)
    firsts = np.empty(len(runs), np.uint64)
    # In a loop that does little else the processor waits for many places in memory at a time.
    for i in range(len(runs)):
        firsts[i] = _first_tokens(tokens, np.int64(runs[i]))
    commons = np.zeros(len(runs), np.int32)
    for i in range(1, len(runs)):
        commons[i] = _common(tokens, np.int64(runs[i - 1]), np.int64(runs[i]), 0, depth)
    new_firsts, new_commons = np.empty_like(firsts), np.empty_like(commons)
    bounds = np.zeros(len(ends) + 1, np.int64)
    bounds[1:] = ends
    count = len(ends)
    while count > 1:
        for pair in range((count + 1) // 2):
            i, middle, end = (
                bounds[2 * pair],
                bounds[2 * pair + 1],
                bounds[min(2 * pair + 2, count)],
            )
            j = middle
            of_one = of_other = 0  # what the next of each run has in common with the last one
            for out in range(i, end):
                if i == middle or j == end:
                    other_first = i == middle
                elif of_one != of_other:
                    other_first = of_other > of_one
                else:
                    one, other = np.int64(positions[i]), np.int64(positions[j])
                    if firsts[i] != firsts[j]:
                        other_first = firsts[j] < firsts[i]
                        common = _common_bits(firsts[i], firsts[j]) // (8 * tokens.itemsize)
                        common = min(common, len(tokens) - max(one, other))
                    else:
                        common = _common(tokens, one, other, of_one, depth)
                        if common == depth:
                            other_first = False
                        elif max(one, other) + common == len(tokens):
                            other_first = other > one
                        else:
                            other_first = tokens[other + common] < tokens[one + common]
                    if other_first:
                        of_one = common
                    else:
                        of_other = common
                taken = j if other_first else i
                new_positions[out], new_firsts[out] = positions[taken], firsts[taken]
                new_commons[out] = of_other if other_first else of_one
                if other_first:
                    j += 1
                    of_other = commons[j] if j < end else 0
                else:
                    i += 1
                    of_one = commons[i] if i < middle else 0
            bounds[pair] = bounds[2 * pair]
        count = (count + 1) // 2
        bounds[count] = len(runs)
        positions, new_positions = new_positions, positions
        firsts, new_firsts = new_firsts, firsts
        commons, new_commons = new_commons, commons
    return positions
