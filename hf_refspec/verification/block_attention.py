"""Attention of packed rows, each to its own entries: in one call where they are alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from .cache import Pass
from .row_blocks import RowEntries

# Rows of a block attend in one call if its work is at most `_PADDED` times that of one call a row.
# A call itself takes as long as `_CALL` products of a query and a key.
_PADDED, _CALL = 2.0, 1024


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
    """What a pass runs of each row, behind these entries."""
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


def attending_together(rows: Sequence[RowPass]) -> list[Sequence[RowPass]]:
    """The rows of a block in the groups that attend in one call each: all of them, or each that has
    tokens by itself."""
    own = [row for row in rows if row.size]
    work = sum(row.size * (row.end - row.entries.skipped) for row in own)
    length = max(row.end for row in rows) - min(row.entries.skipped for row in rows)
    padded = len(rows) * max(row.size for row in rows) * length
    if len(own) > 1 and padded <= _PADDED * work + _CALL * len(rows):
        return [rows]
    return [[row] for row in own]


def on_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A tensor of this array, without waiting for a GPU."""
    return torch.from_numpy(array).to(device, non_blocking=True)


class RowGroup:
    """Rows that attend in one call: a single one, or all of a block, in the order in which they
    stand there. Their tokens are those of the pass from token `start` on."""

    def __init__(self, rows: Sequence[RowPass], start: int, device: torch.device) -> None:
        self._rows = rows
        self._block, first = rows[0].entries.block, rows[0].entries.at
        self._at = slice(first, first + len(rows))  # their places in the block
        sizes = np.array([row.size for row in rows])
        self.size, self._most = int(sizes.sum()), int(sizes.max())
        self._tokens = slice(start, start + self.size)
        self._end = max(row.end for row in rows)
        places = np.repeat(np.arange(first, first + len(rows)), sizes)
        slots = np.concatenate([np.arange(row.entries.length, row.end) for row in rows])
        self._targets = on_device(places, device), on_device(slots, device)
        # Where rows have fewer tokens than the longest: which tokens stand in the place of those
        # that they lack, and which of all are their own.
        self._padded: tuple[torch.Tensor, torch.Tensor] | None = None
        if self._most * len(rows) > self.size:
            ends, steps = np.cumsum(sizes)[:, None], np.arange(self._most)
            wanted = np.clip(ends - sizes[:, None] + steps, 0, ends - 1).clip(0)
            own = np.flatnonzero(steps < sizes[:, None])
            self._padded = on_device(wanted.ravel(), device), on_device(own, device)
        # By window, heads that share keys, device and type: layers may differ in each.
        self._seen: dict[tuple[Any, ...], tuple[slice, torch.Tensor | None]] = {}

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Writes keys and values `(1, heads, S, head_dim)` of the pass behind the rows."""
        for entries, new in zip(self._block.layers[layer], (keys, values), strict=True):
            at, slots = (index.to(entries.device) for index in self._targets)
            entries.transpose(1, 2)[at, slots] = new[0, :, self._tokens].transpose(0, 1)

    def attend(
        self, layer: int, query: torch.Tensor, scale: float | None, window: int | None
    ) -> torch.Tensor:
        """Attention of the queries `(1, heads, S, head_dim)` of the rows to their own entries."""
        keys, values = self._block.layers[layer]
        seen, mask = self._seen_in(window, query.shape[1] // keys.shape[1], query)
        keys, values = keys[self._at, :, seen], values[self._at, :, seen]
        if len(self._rows) == 1:
            return _attended(query, keys, values, mask, scale)
        count, heads = len(self._rows), query.shape[1]
        if self._padded is not None:
            query = query.index_select(2, self._padded[0].to(query.device))
        query = query.view(heads, count, self._most, -1).transpose(0, 1)  # (rows, heads, S, ...)
        attended = _attended(query, keys, values, mask, scale)
        attended = attended.transpose(0, 1).reshape(1, heads, count * self._most, -1)
        if self._padded is None:
            return attended
        return attended.index_select(2, self._padded[1].to(query.device))

    def _seen_in(
        self, window: int | None, groups: int, query: torch.Tensor
    ) -> tuple[slice, torch.Tensor | None]:
        """The entries that some token sees, and the mask of these as it is added to the scores:
        `(rows, 1, groups * S, length)`, for heads that share keys one behind another."""
        key = window, groups, query.device, query.dtype
        if key not in self._seen:
            begin, mask = min(row.entries.begin(window) for row in self._rows), None
            if not all(row.sees_all(begin, self._end, window) for row in self._rows):
                visible = seen_entries(self._rows, self._most, slice(begin, self._end), window)
                hidden = ~on_device(visible, query.device).repeat(1, groups, 1)[:, None]
                mask = query.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
            self._seen[key] = slice(begin, self._end), mask
        return self._seen[key]


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


def _attended(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
) -> torch.Tensor:
    """Attention of queries `(rows, heads, S, head_dim)` to keys and values of fewer heads, which
    are not repeated: the queries that share them stand one behind another, for which torch's kernel
    on CPUs takes a fifth of the time in bfloat16 and no more in float32."""
    rows, heads, size, head_dim = query.shape
    grouped = query.reshape(rows, keys.shape[1], -1, head_dim)
    attended = nn.functional.scaled_dot_product_attention(
        grouped, keys, values, attn_mask=mask, scale=scale
    )
    return attended.reshape(rows, heads, size, values.shape[-1])
