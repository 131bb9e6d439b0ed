"""Attention of the rows of a block, each to its own entries: in one call where they are alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from .row_blocks import RowEntries

# Rows of a block attend in one call if its work is at most `_PADDED` times that of one call a row.
# A call itself takes as long as `_CALL` products of a query and a key.
_PADDED, _CALL = 2.0, 1024


@dataclass
class RowPass:
    """The tokens of one row in a pass.

    Attributes:
        visible (`np.ndarray`, bool of shape `(S, S)`): What its S tokens see of each other.
        hidden (`torch.Tensor`, *optional*): Which of its first tokens none of them sees.
    """

    entries: RowEntries
    visible: np.ndarray
    hidden: torch.Tensor | None

    @property
    def size(self) -> int:
        return len(self.visible)

    @property
    def end(self) -> int:
        return self.entries.length + self.size

    def mask(self) -> torch.Tensor | None:
        """Which of all its entries each token sees, bool `(S, end)`; `None` hides nothing."""
        if self.hidden is None and self.size == 1:
            return None
        mask = torch.ones((self.size, self.end), dtype=torch.bool)
        mask[:, self.entries.length :] = torch.from_numpy(self.visible)
        if self.hidden is not None:
            mask[:, : len(self.hidden)] &= ~self.hidden.cpu()
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
        self._masks: list[torch.Tensor | None] = (
            [self._mask_of_all()] if self._together else [row.mask() for row in rows]
        )
        # So many heads share keys, for which masks are repeated, on this device and in this type:
        # layers may be on several.
        self._masked_for: tuple[int, torch.device, torch.dtype] | None = None

    def _mask_of_all(self) -> torch.Tensor | None:
        """Which entries of its row each token sees, bool `(rows, S, length)`."""
        if self._most == 1 and all(row.end == self._length for row in self._rows):
            return None
        mask = np.zeros((len(self._rows), self._most, self._length), dtype=np.bool_)
        for own, row in zip(mask, self._rows, strict=True):
            own[:, : row.entries.length] = True
            own[: row.size, row.entries.length : row.end] = row.visible
            own[row.size :] = own[row.size - 1]
        return torch.from_numpy(mask)

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Writes keys and values `(1, heads, S, head_dim)` of the pass behind the rows."""
        for entries, new in zip(self._block.layers[layer], (keys, values), strict=True):
            at, slots = self._at.to(entries.device), self._slots.to(entries.device)
            entries.transpose(1, 2)[at, slots] = new[0, :, self.tokens].transpose(0, 1)

    def attend(self, layer: int, query: torch.Tensor, scale: float | None) -> torch.Tensor:
        """Attention of the queries `(1, heads, S, head_dim)` of the rows to their own entries."""
        keys, values = self._block.layers[layer]
        # Where each row has a single token, the heads that share keys may stand in the place of
        # tokens.
        per_token = query.shape[2] // self.size
        groups = query.shape[1] // keys.shape[1]
        masked_for = groups, query.device, query.dtype
        if masked_for != self._masked_for:
            self._repeated = [_repeated(mask, groups, query) for mask in self._masks]
            self._masked_for = masked_for
        if self._together and per_token == 1:
            return self._attend_together(keys, values, query, scale)
        masks = self._repeated
        if self._together:
            masks = [_repeated(row.mask(), groups, query) for row in self._rows]
        queries = query.split([per_token * size for size in self._sizes], dim=2)
        parts = zip(queries, self._rows, masks, strict=True)
        return torch.cat(
            [
                _attended(
                    q,
                    keys[row.entries.at, :, : row.end][None],
                    values[row.entries.at, :, : row.end][None],
                    mask,
                    scale,
                )
                for q, row, mask in parts
                if q.shape[2]
            ],
            dim=2,
        )

    def _attend_together(
        self, keys: torch.Tensor, values: torch.Tensor, query: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        count, heads = len(self._rows), query.shape[1]
        if self._padded is not None:
            query = query.index_select(2, self._padded[0].to(query.device))
        query = query.view(heads, count, self._most, -1).transpose(0, 1)  # (rows, heads, S, ...)
        keys, values = keys[:count, :, : self._length], values[:count, :, : self._length]
        attended = _attended(query, keys, values, self._repeated[0], scale)
        attended = attended.transpose(0, 1).reshape(1, heads, count * self._most, -1)
        if self._padded is None:
            return attended
        return attended.index_select(2, self._padded[1].to(query.device))


def _repeated(mask: torch.Tensor | None, groups: int, like: torch.Tensor) -> torch.Tensor | None:
    """A mask `(S, length)` or `(rows, S, length)` as it is added to the scores of such queries,
    `(..., groups * S, length)`: their heads that share keys stand one behind another."""
    if mask is None:
        return None
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
