"""The tokens of a row in a pass, and what they see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from .cache import Pass
from .row_blocks import RowEntries


@dataclass
class RowPass:
    """The tokens of one row in a pass: those that are pending, then the nodes of its draft.

    Attributes:
        tokens (`np.ndarray`, int64 of shape `(S,)`): Their ids.
        places (`np.ndarray`, int64 of shape `(S,)`): The index in the row that each has, or would
            have if it were accepted.
        visible (`np.ndarray`, bool of shape `(S, S)`): Which of each other they see: pending tokens
            those before them, nodes all pending tokens and their ancestors.
    """

    entries: RowEntries
    tokens: np.ndarray
    places: np.ndarray
    visible: np.ndarray

    @property
    def size(self) -> int:
        return len(self.visible)

    @property
    def end(self) -> int:
        return self.entries.length + self.size

    def sees_all(self, begin: int, end: int, window: int | None) -> bool:
        """Whether it has a single token, which sees all entries from `begin` to `end`."""
        own = self.entries.begin(window), self.end
        return self.size == 1 and self.entries.hidden is None and own == (begin, end)

    def sees(self, start: int, window: int | None) -> np.ndarray:
        """Which of its entries from `start` on each token sees, bool `(S, end - start)`."""
        length = self.entries.length
        mask = np.ones((self.size, self.end - start), dtype=np.bool_)
        mask[:, length - start :] = self.visible
        mask[:, : max(self.entries.skipped - start, 0)] = False
        if (hidden := self.entries.hidden) is not None:
            mask[:, : max(len(hidden) - start, 0)] &= ~hidden[start:]
        if window is not None:
            steps = self.places - self.places[:1]
            places = np.concatenate([np.arange(start - length, 0), steps])
            mask &= steps[:, None] - places < window
        return mask


def rows_of_pass(now: Pass, entries: Sequence[RowEntries]) -> list[RowPass]:
    """The tokens of each row that a pass runs behind these entries."""
    rows = []
    for i, (row, draft, pending) in enumerate(zip(now.rows, now.drafts, now.pending, strict=True)):
        size, length = pending + len(draft), len(row)
        tokens = np.concatenate((row.tail(pending), draft.tokens), dtype=np.int64)
        places = np.concatenate(
            (np.arange(length - pending, length), length - 1 + draft.depths()), dtype=np.int64
        )
        visible = np.zeros((size, size), dtype=np.bool_)
        visible[:pending, :pending] = np.tri(pending, dtype=np.bool_)
        visible[pending:, :pending] = True
        visible[pending:, pending:] = draft.ancestors()
        rows.append(RowPass(entries[i], tokens, places, visible))
    return rows


def side_by_side(now: Pass, rows: Sequence[RowPass], size: int) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of all rows and their places, int64 `(R, size)`. Those that a row lacks repeat the
    last token of its text."""
    tokens, places = np.empty((2, len(rows), size), dtype=np.int64)
    for i, (text, row) in enumerate(zip(now.rows, rows, strict=True)):
        tokens[i], places[i] = text.tail(1)[0], len(text) - 1
        tokens[i, : row.size], places[i, : row.size] = row.tokens, row.places
    return tokens, places


def seen_entries(
    rows: Sequence[RowPass], size: int, entries: slice, window: int | None
) -> np.ndarray:
    """Which of these entries of its row each of `size` tokens sees, bool `(rows, size, length)`. A
    token that a row lacks sees what its last one does."""
    seen = np.zeros((len(rows), size, entries.stop - entries.start), dtype=np.bool_)
    for own, row in zip(seen, rows, strict=True):
        own[:, : row.entries.length - entries.start] = True
        if row.size:
            own[: row.size, : row.end - entries.start] = row.sees(entries.start, window)
            own[row.size :] = own[row.size - 1]
    return seen


def on_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A tensor of this array, without waiting for a GPU."""
    return torch.from_numpy(array).to(device, non_blocking=True)
