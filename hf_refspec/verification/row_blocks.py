"""The keys and values of rows that each have a length of their own.

Rows of like length stand in one block, so that they can attend in one call:

    block of 256 tokens   p p p x x x r d _ _        p  prompt, x  output
                          p p x x r d d d _ _        r  root, d  draft nodes
    block of 576 tokens   p p p p p p p p x x r d _ _ _ _ _

A row that outgrows its block moves to the next longer one. Rows of a block stand in the order in
which they came.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from .cache import LayerEntries

# The tokens of a row in the shortest block; each block is half as long again as the one before.
_SHORTEST = 256


def rows_of_prompts(model_kwargs: Mapping[str, Any], count: int, length: int) -> list[RowEntries]:
    """`count` rows whose prompts, with what a given cache holds, are `length` tokens long."""
    rows = [RowEntries(0, length) for _ in range(count)]
    if (mask := model_kwargs.get("attention_mask")) is not None:
        hidden = mask[:, :length].numpy(force=True) == 0
        padding = np.logical_and.accumulate(hidden, axis=1).sum(axis=1).tolist()
        for row, own, skipped in zip(rows, hidden, padding, strict=True):
            row.skipped, row.hidden = skipped, own if own[skipped:].any() else None
    return rows


def first_visible(length: int, window: int | None) -> int:
    """The first of `length` entries that is inside of the next token's window."""
    return 0 if window is None else max(0, length - window + 1)


def block_size(length: int) -> int:
    """The slots of the shortest block for rows of this length."""
    slots = _SHORTEST
    while slots < length:
        slots += slots // 2
    return slots


class Block:
    """Rows of up to `slots` tokens. Their entries in each layer are tensors
    `(capacity, heads, slots, head_dim)`, of which the first rows are taken."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.rows: list[RowEntries] = []
        self.layers: LayerEntries = []

    def add(self, row: RowEntries, states: LayerEntries, capacity: int) -> None:
        """Copies a row in, whose first entries are these, `(1, heads, n, head_dim)`; where there is
        no room, room is made for `capacity` rows."""
        at, length = len(self.rows), states[0][0].shape[2]
        if not self.layers or len(self.layers[0][0]) == at:
            self._grow(states, max(capacity, at + 1 + at // 4))
        for own, given in zip(self.layers, states, strict=True):
            for entries, new in zip(own, given, strict=True):
                entries[at, :, :length] = new[0]
        row.block, row.at = self, at
        self.rows.append(row)

    def remove(self, at: int) -> None:
        """Takes out the row at a place; those behind it move up."""
        del self.rows[at]
        end = len(self.rows)
        for layer in self.layers if at < end else []:
            for entries in layer:
                entries[at:end] = entries[at + 1 : end + 1].clone()
        for row in self.rows[at:]:
            row.at -= 1
        if not self.rows:
            self.layers = []

    def _grow(self, like: LayerEntries, capacity: int) -> None:
        """Makes room for `capacity` rows. New slots are zero, so that no mask has to hide a NaN."""
        before, count = self.layers, len(self.rows)
        self.layers = [
            (
                keys.new_zeros((capacity, keys.shape[1], self.slots, keys.shape[3])),
                values.new_zeros((capacity, values.shape[1], self.slots, values.shape[3])),
            )
            for keys, values in like
        ]
        for grown, kept in zip(self.layers, before, strict=False):  # none at first
            for entries, each in zip(grown, kept, strict=True):
                entries[:count] = each[:count]


class RowEntries:
    """A row of a block: the first `length` slots are kept, and a pass writes behind them. The first
    `skipped` ones hold padding, which no token sees."""

    block: Block
    at: int  # its place in the block
    hidden: np.ndarray | None = None  # which of its first slots are hidden, if others are as well

    def __init__(self, skipped: int, length: int) -> None:
        self.skipped = skipped
        self.length = length

    def begin(self, window: int | None) -> int:
        """The first entry that the next token sees."""
        return max(self.skipped, first_visible(self.length, window))

    def keep(self, nodes: Sequence[int]) -> None:
        """Keeps these of the entries behind the row, in this order, and drops the others."""
        start, count = self.length, len(nodes)
        if nodes and nodes[-1] != count - 1:  # they do not stand in place: indices ascend
            source = torch.tensor(nodes) + start
            for layer in self.block.layers:
                source = source.to(layer[0].device, non_blocking=True)
                for each in layer:
                    own = each[self.at]
                    own[:, start : start + count] = own.index_select(1, source)
        self.length += count

    def first(self, length: int) -> LayerEntries:
        """The first entries of each layer, `(1, heads, length, head_dim)`."""
        kept = slice(self.at, self.at + 1), slice(None), slice(length)
        return [(keys[kept], values[kept]) for keys, values in self.block.layers]


class RowBlocks:
    """All blocks of the rows of a call."""

    def __init__(self) -> None:
        self._blocks: dict[int, Block] = {}

    def add(self, row: RowEntries, states: LayerEntries, room: int = 0, capacity: int = 0) -> None:
        """Puts a row in the shortest block that has `room` tokens behind it."""
        slots = block_size(row.length + room)
        block = self._blocks.setdefault(slots, Block(slots))
        block.add(row, states, capacity)

    def make_room(self, row: RowEntries, room: int) -> None:
        """Moves a row to a longer block if it needs one."""
        if row.length + room > row.block.slots:
            before, at = row.block, row.at
            self.add(row, row.first(row.length), room)
            before.remove(at)

    def blocks(self) -> list[Block]:
        """The blocks that hold rows."""
        return [block for block in self._blocks.values() if block.rows]
