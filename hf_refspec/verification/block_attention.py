"""Attention of the rows of a block, each to its own entries: in one call where they are alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from .in_place import first_visible
from .row_blocks import RowEntries

# Rows of a block attend in one call if its work is at most `_PADDED` times that of one call a row.
# A call itself takes as long as `_CALL` products of a query and a key.
_PADDED, _CALL = 2.0, 1024


@dataclass
class RowPass:
    """The tokens of one row in a pass.

    Attributes:
        visible (`np.ndarray`, bool of shape `(S, S)`): What its S tokens see of each other.
        steps (`np.ndarray`, int64 of shape `(S,)`): How many places each stands behind the row.
        hidden (`np.ndarray`, *optional*): Which of its first entries none of them sees.
    """

    entries: RowEntries
    visible: np.ndarray
    steps: np.ndarray
    hidden: np.ndarray | None = None

    @property
    def size(self) -> int:
        return len(self.visible)

    @property
    def end(self) -> int:
        return self.entries.length + self.size

    def sees(self, start: int, window: int | None) -> np.ndarray:
        """Which of its entries from `start` on each token sees, bool `(S, end - start)`."""
        length = self.entries.length
        mask = np.ones((self.size, self.end - start), dtype=np.bool_)
        mask[:, length - start :] = self.visible
        if self.hidden is not None:
            mask[:, : max(len(self.hidden) - start, 0)] &= ~self.hidden[start:]
        if window is not None:
            places = np.concatenate([np.arange(start - length, 0), self.steps])
            mask &= self.steps[:, None] - places < window
        return mask


class BlockPass:
    """The tokens of the rows of one block in a pass, in the order in which they stand there, from
    token `start` of the pass on."""

    def __init__(self, rows: Sequence[RowPass], start: int, device: torch.device) -> None:
        self._rows = rows
        self._block = rows[0].entries.block
        sizes = np.array([row.size for row in rows])
        self._sizes: list[int] = sizes.tolist()
        self.size, self._most = int(sizes.sum()), int(sizes.max())
        self.tokens = slice(start, start + self.size)
        self._length = max(row.end for row in rows)
        self._at = torch.from_numpy(np.repeat(np.arange(len(rows)), sizes)).to(device)
        slots = [np.arange(row.entries.length, row.end) for row in rows]
        self._slots = torch.from_numpy(np.concatenate(slots)).to(device)
        work = sum(row.size * row.end for row in rows)
        padded = len(rows) * self._most * self._length
        self._together = (
            len(rows) > 1
            and padded <= _PADDED * work + _CALL * len(rows)
            and all(row.hidden is None for row in rows)
        )
        # Where rows that attend together have fewer tokens than the longest: which tokens stand in
        # their places, and which of these places are their own.
        self._padded: tuple[torch.Tensor, torch.Tensor] | None = None
        if self._together and self._most * len(rows) > self.size:
            ends, steps = np.cumsum(sizes)[:, None], np.arange(self._most)
            wanted = np.clip(ends - sizes[:, None] + steps, 0, ends - 1).clip(0)
            own = np.flatnonzero(steps < sizes[:, None])
            self._padded = (
                torch.from_numpy(wanted.ravel()).to(device),
                torch.from_numpy(own).to(device),
            )
        # By window, heads that share keys, device and type: layers may differ in each.
        self._masks: dict[tuple[Any, ...], list[torch.Tensor | None]] = {}

    def _masks_for(
        self, window: int | None, groups: int, query: torch.Tensor, together: bool
    ) -> list[torch.Tensor | None]:
        """The mask of each row, or of all together, as attention takes it."""
        key = window, groups, query.device, query.dtype, together
        if key not in self._masks:
            masks = (
                [self._mask_of_all(window)] if together else [_mask(r, window) for r in self._rows]
            )
            self._masks[key] = [_repeated(mask, groups, query) for mask in masks]
        return self._masks[key]

    def _begin(self, window: int | None) -> int:
        """The first entry that any row sees."""
        return min(first_visible(row.entries.length, window) for row in self._rows)

    def _mask_of_all(self, window: int | None) -> np.ndarray | None:
        """Which entries of its row each token sees, bool `(rows, S, length)`."""
        if self._most == 1 and all(row.end == self._length for row in self._rows):
            return None
        seen = slice(self._begin(window), self._length)
        return seen_entries(self._rows, self._most, seen, window)

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Writes keys and values `(1, heads, S, head_dim)` of the pass behind the rows."""
        for entries, new in zip(self._block.layers[layer], (keys, values), strict=True):
            at, slots = self._at.to(entries.device), self._slots.to(entries.device)
            entries.transpose(1, 2)[at, slots] = new[0, :, self.tokens].transpose(0, 1)

    def attend(
        self, layer: int, query: torch.Tensor, scale: float | None, window: int | None
    ) -> torch.Tensor:
        """Attention of the queries `(1, heads, S, head_dim)` of the rows to their own entries."""
        keys, values = self._block.layers[layer]
        # Where each row has a single token, the heads that share keys may stand in the place of
        # tokens.
        per_token = query.shape[2] // self.size
        groups = query.shape[1] // keys.shape[1]
        if self._together and per_token == 1:
            [mask] = self._masks_for(window, groups, query, together=True)
            seen = slice(self._begin(window), self._length)
            return self._attend_together(keys[:, :, seen], values[:, :, seen], query, scale, mask)
        masks = self._masks_for(window, groups, query, together=False)
        queries = query.split([per_token * size for size in self._sizes], dim=2)
        parts = []
        for own, row, mask in zip(queries, self._rows, masks, strict=True):
            if row.size:
                at, seen = row.entries.at, slice(first_visible(row.entries.length, window), row.end)
                states = keys[at : at + 1, :, seen], values[at : at + 1, :, seen]
                parts.append(_attended(own, *states, mask, scale))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)

    def _attend_together(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        query: torch.Tensor,
        scale: float | None,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        count, heads = len(self._rows), query.shape[1]
        if self._padded is not None:
            query = query.index_select(2, self._padded[0].to(query.device))
        query = query.view(heads, count, self._most, -1).transpose(0, 1)  # (rows, heads, S, ...)
        attended = _attended(query, keys[:count], values[:count], mask, scale)
        attended = attended.transpose(0, 1).reshape(1, heads, count * self._most, -1)
        if self._padded is None:
            return attended
        return attended.index_select(2, self._padded[1].to(query.device))


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


def _mask(row: RowPass, window: int | None) -> np.ndarray | None:
    """Which entries the tokens of a row see; `None` hides nothing."""
    if row.hidden is None and row.size == 1:
        return None
    return row.sees(first_visible(row.entries.length, window), window)


def _repeated(seen: np.ndarray | None, groups: int, like: torch.Tensor) -> torch.Tensor | None:
    """A mask `(S, length)` or `(rows, S, length)` as it is added to the scores of such queries,
    `(..., groups * S, length)`: their heads that share keys stand one behind another."""
    if seen is None:
        return None
    mask = torch.from_numpy(seen)
    repeated = mask.repeat(groups, 1) if mask.ndim == 2 else mask.repeat(1, groups, 1)[:, None]
    hidden = ~repeated.to(like.device, non_blocking=True)
    return like.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)


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
