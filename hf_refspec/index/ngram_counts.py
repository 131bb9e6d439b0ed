"""How often n-grams occur in a text, by one walk along its suffix array."""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .kernels import kernel
from .suffix_array import IndexedText

# Suffixes that are read at a time.
BLOCK = 1 << 17
RAREST = 2  # n-grams that occur once are of no use


@dataclass(slots=True, eq=False)
class _Order:
    """Candidates for the commonest n-grams of one length, in the order of the text's suffixes."""

    most: int  # how many are wanted
    found: np.ndarray  # int64, (n, 2), where each occurs, and how often
    least: int = RAREST  # the fewest occurrences that count

    def add(self, runs: np.ndarray) -> None:
        self.found = np.concatenate([self.found, runs])
        if len(self.found) > 4 * self.most:
            self.cut()

    def cut(self) -> None:
        """Keeps at most twice the wanted number, and all or none of equally common ones."""
        counts = self.found[:, 1]
        if len(counts) > 2 * self.most:
            place = len(counts) - 2 * self.most - 1
            self.least = int(np.partition(counts, place)[place]) + 1
            self.found = self.found[counts >= self.least]

    def commonest(self) -> np.ndarray:
        """Where they occur, the commonest first."""
        self.cut()
        order = np.argsort(-self.found[:, 1], kind="stable")[: self.most]
        return self.found[order, 0]


def common_ngrams(text: IndexedText, longest: int, per_order: int) -> list[np.ndarray]:
    """Finds the commonest n-grams of each length in a text, in memory that does not grow with it:
    of each length from 1 on, int32 of shape `(count, n)`, those that occur at least twice, the
    commonest first. If too many are equally common, all of these are left out."""
    orders = [_Order(per_order, np.empty((0, 2), np.int64)) for _ in range(longest)]
    runs = np.full((longest, 2), -1, np.int64)
    ended = np.empty((longest, BLOCK // RAREST + 1, 2), np.int64)
    before = -1
    for start in range(0, len(text.suffixes), BLOCK):
        suffixes = text.suffixes[start : start + BLOCK]
        least = np.array([order.least for order in orders])
        numbers = count_runs(text.tokens, suffixes, before, text.vocab_size, least, runs, ended)
        before = int(suffixes[-1])
        for order, some, number in zip(orders, ended, numbers, strict=True):
            order.add(some[:number])
    for order, run in zip(orders, runs, strict=True):
        if run[0] >= 0 and run[1] >= order.least:
            order.add(run[None])
    return [
        text.tokens[order.commonest()[:, None] + np.arange(length)].astype(np.int32)
        for length, order in enumerate(orders, start=1)
    ]


_COUNTS = (
    "int64[::1]({0}[::1], int32[::1], int64, int64, int64[::1], int64[:, ::1], int64[:, :, ::1])"
)


@kernel(_COUNTS.format("uint16"), _COUNTS.format("uint32"), drafts=False)
def count_runs(tokens, suffixes, before, vocab_size, least, runs, ended):
    """Counts the n-grams of each length: each is a run of a suffix array, of which `suffixes` is
    the next part and `before` the suffix before it, -1 if there is none. Tokens from `vocab_size`
    on separate documents.

    `least` has the fewest occurrences that count for each length. `runs` (lengths, 2) has where the
    n-gram of the current run occurs (-1 if its document ends before) and how often; it is read and
    written. `ended` (lengths, room, 2) receives both for each run that has ended; their numbers are
    returned."""
    numbers = np.zeros(len(runs), dtype=np.int64)
    for i in range(len(suffixes)):
        position = np.int64(suffixes[i])
        length = 0
        while (
            length < len(runs)
            and position >= 0
            and position + length < len(tokens)
            and tokens[position + length] < vocab_size
        ):
            length += 1
        shared = 0
        while (
            before >= 0
            and shared < length
            and before + shared < len(tokens)
            and tokens[before + shared] == tokens[position + shared]
        ):
            shared += 1
        for order in range(len(runs)):
            if shared > order:
                runs[order, 1] += 1
                continue
            if runs[order, 0] >= 0 and runs[order, 1] >= least[order]:
                ended[order, numbers[order], 0] = runs[order, 0]
                ended[order, numbers[order], 1] = runs[order, 1]
                numbers[order] += 1
            runs[order, 0] = position if length > order else -1
            runs[order, 1] = 1
        before = position
    return numbers
