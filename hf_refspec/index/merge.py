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

import numpy as np
from numba import njit

from .kernels import kernel
from .suffix_array import DAMAGED, DEPTH

# About so many suffixes are merged at once.
BLOCK = 1 << 18
# So many tokens are compared at once.
STRIDE = 64


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
        for lows, highs in zip(bounds, bounds[1:], strict=False):
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
        for index in range(block, len(array), block)
        if array[index] < runs[number].settled
    )
    bounds = [[0] * len(runs)]
    for cut, cut_run, cut_index in cuts:
        places = []
        for number, array in enumerate(arrays):
            search = bisect_right if number < cut_run else bisect_left
            key = partial(beginning, number)
            places.append(
                cut_index if number == cut_run else search(range(len(array)), cut, key=key)
            )
        bounds.append(places)
    return [*bounds, [len(array) for array in arrays]]


@njit
def _key(tokens, position):
    """The first tokens of a suffix in 64 bits that sort as they do; 0 where the text has ended."""
    count = 8 // tokens.itemsize
    key = np.uint64(0)
    for i in range(position, position + count):
        token = np.uint64(tokens[i]) if i < len(tokens) else np.uint64(0)
        key = key << np.uint64(8 * tokens.itemsize) | token
    return key


@njit
def _is_before(tokens, one, other, depth):
    """Whether a suffix sorts before another one; the one that ends first does."""
    length = min(depth, len(tokens) - max(one, other))
    start = 0
    while start < length:
        count = min(STRIDE, length - start)
        if _count_differences(tokens, np.uint64(one + start), np.uint64(other + start), count):
            while tokens[one + start] == tokens[other + start]:
                start += 1
            return tokens[one + start] < tokens[other + start]
        start += count
    return one > other and length < depth


@njit
def _count_differences(tokens, one, other, count):
    """How many of the next tokens differ; without a way out of the loop it becomes vector
    instructions."""
    differences = 0
    for i in range(np.uint64(count)):
        differences += tokens[one + i] != tokens[other + i]
    return differences


@kernel(
    "int32[::1](uint16[::1], int32[::1], int64[::1], int64)",
    "int32[::1](uint32[::1], int32[::1], int64[::1], int64)",
    drafts=False,
)
def merge_runs(tokens, runs, ends, depth):
    """Merges sorted runs of suffixes, two neighbours at a time.

    The first tokens of each are kept beside it: most comparisons need no more, and reading them
    all in one loop lets the processor wait for many places in memory at the same time.

    Args:
        tokens: The text.
        runs: Positions in it, one run after another.
        ends: Where each run ends.
        depth: How many tokens of a suffix count.

    Returns:
        The positions in order; of equal suffixes that of the earlier run first.
    """
    step = 8 // tokens.itemsize
    positions, firsts, seconds = runs.copy(), np.empty(len(runs), np.uint64), np.empty(len(runs), np.uint64)
    for i in range(len(runs)):
        firsts[i] = _key(tokens, np.int64(runs[i]))
        seconds[i] = _key(tokens, np.int64(runs[i]) + step)
    new_positions, new_firsts, new_seconds = np.empty_like(positions), np.empty_like(firsts), np.empty_like(seconds)
    bounds = np.zeros(len(ends) + 1, np.int64)
    bounds[1:] = ends
    count = len(ends)
    while count > 1:
        for pair in range((count + 1) // 2):
            i, middle = bounds[2 * pair], bounds[2 * pair + 1]
            j, end = middle, bounds[min(2 * pair + 2, count)]
            for out in range(i, end):
                if i == middle:
                    right = True
                elif j >= end:
                    right = False
                elif firsts[i] != firsts[j]:
                    right = firsts[j] < firsts[i]
                elif seconds[i] != seconds[j]:
                    right = seconds[j] < seconds[i]
                else:
                    right = _is_before(tokens, np.int64(positions[j]), np.int64(positions[i]), depth)
                taken = j if right else i
                new_positions[out] = positions[taken]
                new_firsts[out], new_seconds[out] = firsts[taken], seconds[taken]
                if right:
                    j += 1
                else:
                    i += 1
            bounds[pair] = bounds[2 * pair]
        count = (count + 1) // 2
        bounds[count] = len(runs)
        positions, new_positions = new_positions, positions
        firsts, new_firsts = new_firsts, firsts
        seconds, new_seconds = new_seconds, seconds
    return positions
