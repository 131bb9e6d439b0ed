"""The commonest n-grams of several texts, counted by one walk along their suffix arrays.

The order is that of CREST's code: the commonest first, of equally common ones the smallest token
ids first, which is their order in a suffix array.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeAlias

import numpy as np

from ..kernels.kernel import kernel
from .suffix_array import DAMAGED, IndexedText

# Suffixes that are held at a time: of all texts together, and of each at least.
BLOCK, LEAST_BLOCK = 1 << 17, 1 << 12
# Rows of suffixes are their tokens plus 1, padded: with 0 behind the text's last token, with
# `_SEPARATOR` behind a document's. So they have the order of the suffix array.
_SEPARATOR = 2**32 - 1

# Different rows in order, each as the bytes of its big-endian numbers; and how often each occurs.
Runs: TypeAlias = tuple[np.ndarray, np.ndarray]


@dataclass(slots=True, eq=False)
class _Order:
    """The commonest n-grams of one length so far, in the order of their tokens."""

    wanted: int  # how many
    ngrams: np.ndarray  # uint32, (count, length), tokens plus 1
    counts: np.ndarray  # int64
    least: int = 1  # the fewest occurrences that count
    begun: int = 0  # suffixes before the current run

    def add(self, rows: np.ndarray, places: np.ndarray, ends: np.ndarray) -> None:
        """Adds the runs that end at some of the rows; `places` has how many suffixes there are up
        to each."""
        counts = np.diff(places[ends], prepend=self.begun)
        self.begun = int(places[ends[-1]]) if len(ends) else self.begun
        last = rows[ends, -1]
        kept = (counts >= self.least) & (last > 0) & (last < _SEPARATOR)
        self.ngrams = np.concatenate([self.ngrams, rows[ends[kept]]])
        self.counts = np.concatenate([self.counts, counts[kept]])
        if len(self.counts) > 4 * self.wanted:
            order = self.commonest()
            self.least = int(self.counts[order[-1]]) + 1  # later ones lose a tie
            self.ngrams, self.counts = self.ngrams[np.sort(order)], self.counts[np.sort(order)]

    def commonest(self) -> np.ndarray:
        """The indices of the wanted ones, the commonest first."""
        return np.argsort(-self.counts, kind="stable")[: self.wanted]


def common_ngrams(
    texts: Sequence[IndexedText], longest: int, per_order: int
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Finds the commonest n-grams of each length from 1 to `longest` in all texts together, the
    commonest first: int32 arrays of shape `(count, n)`, and how often each occurs, int64 of shape
    `(count,)`. N-grams do not span documents.

    However long the texts are, it holds at most `4 * per_order + BLOCK` n-grams of each length, and
    the first tokens of `BLOCK` suffixes (of each text of `LEAST_BLOCK`, if that is more)."""
    orders = [
        _Order(per_order, np.empty((0, length), np.uint32), np.empty(0, np.int64))
        for length in range(1, longest + 1)
    ]
    before = np.zeros((1, longest), np.uint32)
    read = 0
    end = before.astype(">u4").view(f"S{4 * longest}")[0], np.zeros(1, np.int64)  # ends all runs
    size = max(BLOCK // len(texts), LEAST_BLOCK)
    for keys, counts in chain(_merged([_runs(text, longest, size) for text in texts]), [end]):
        rows = np.concatenate([before, keys.view(">u4").reshape(-1, longest).astype(np.uint32)])
        places = np.cumsum(np.concatenate([[read], counts]))
        changed = np.logical_or.accumulate(rows[1:] != rows[:-1], axis=1)
        for length, order in enumerate(orders, start=1):
            order.add(rows[:, :length], places, np.flatnonzero(changed[:, length - 1]))
        before = rows[-1:]
        read = int(places[-1])
    found = [(order, order.commonest()) for order in orders]
    ngrams = [(order.ngrams[indices] - 1).astype(np.int32) for order, indices in found]
    return ngrams, [order.counts[indices] for order, indices in found]


def _merged(streams: Sequence[Iterator[Runs]]) -> Iterator[Runs]:
    """Merges the runs of several texts; equal ones may follow each other."""
    held = {stream: runs for stream in streams if (runs := next(stream, None)) is not None}
    while held:
        until = min(keys[-1] for keys, _ in held.values())
        parts = []
        for stream, (keys, counts) in [*held.items()]:
            end = len(keys) if keys[-1] == until else np.searchsorted(keys, until, "right")
            parts.append((keys[:end], counts[:end]))
            runs = (keys[end:], counts[end:]) if end < len(keys) else next(stream, None)
            if runs is None:
                del held[stream]
            else:
                held[stream] = runs
        keys, counts = (np.concatenate(part) for part in zip(*parts, strict=True))
        order = np.argsort(keys, kind="stable")
        yield keys[order], counts[order]


def _runs(text: IndexedText, longest: int, size: int) -> Iterator[Runs]:
    """Yields the runs of `size` suffixes at a time of one text."""
    for start in range(0, len(text.suffixes), size):
        suffixes = text.suffixes[start : start + size]
        rows = np.empty((len(suffixes), longest), np.uint32)
        counts = np.empty(len(suffixes), np.int64)
        number = count_runs(text.tokens, suffixes, text.vocab_size, rows, counts)
        keys = rows[:number].astype(">u4").view(f"S{4 * longest}")
        yield keys.reshape(-1), counts[:number]


_COUNTS = "int64({0}[::1], int32[::1], int64, uint32[:, ::1], int64[::1])"


@kernel(_COUNTS.format("uint16"), _COUNTS.format("uint32"), drafts=False)
def count_runs(tokens, suffixes, vocab_size, rows, counts):
    """Writes the first tokens of suffixes into `rows` and how many in a row have the same into
    `counts`; returns how many rows there are. Tokens from `vocab_size` on separate documents."""
    number = 0
    for i in range(len(suffixes)):
        position = np.int64(suffixes[i])
        if position < 0 or position >= len(tokens):
            raise ValueError(DAMAGED)
        value = np.int64(1)
        same = number > 0
        for column in range(rows.shape[1]):
            if 0 < value < _SEPARATOR:
                if position + column >= len(tokens):
                    value = 0
                elif tokens[position + column] >= vocab_size:
                    value = _SEPARATOR
                else:
                    value = np.int64(tokens[position + column]) + 1
            rows[number, column] = value
            same = same and rows[number - 1, column] == value
        if same:
            counts[number - 1] += 1
        else:
            counts[number] = 1
            number += 1
    return number
