"""Keys and values in place: each pass writes behind the rows, where transformers' cache copies all
that it holds in every pass.

The layers of a call's cache are taken in after the prefill. From then on a layer with a sliding
window keeps all entries, each in the slot of its index, and masks hide what is outside of the
window: so drafts may branch and be rejected behind it. A cache that is returned is filled in the
end as plain decoding would have left it.

Rows of like length stand in one block, so that they can attend in one call:

    block of 256 tokens   p p p x x x r d _ _        p  prompt, x  output
                          p p x x r d d d _ _        r  root, d  draft nodes
    block of 576 tokens   p p p p p p p p x x r d _ _ _ _ _

A row that outgrows its block moves to the next longer one. Rows of a block stand in the order in
which they came.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import Cache, DynamicLayer, PreTrainedModel

from ..transformers_names import USUAL_ARGUMENTS, SlidingLayer, belongs_to_caller
from .caches import LayerEntries, find_cache, new_cache
from .entries import Entries
from .passes import Pass, uploaded

# The tokens of a row in the shortest block; each block is half as long again as the one before.
_SHORTEST = 256


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

    def move(self, slots: torch.Tensor) -> None:
        """Moves these entries, int64 `(n,)`, to the first slots behind the row."""
        behind = slice(self.length, self.length + len(slots))
        for layer in self.block.layers:
            slots = slots.to(layer[0].device, non_blocking=True)
            for states in layer:
                own = states[self.at]
                own[:, behind] = own.index_select(1, slots)

    def first(self, length: int) -> LayerEntries:
        """The first entries of each layer, `(1, heads, length, head_dim)`."""
        kept = slice(self.at, self.at + 1), slice(None), slice(length)
        return [(keys[kept], values[kept]) for keys, values in self.block.layers]


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
        at = len(self.rows)
        length = states[0][0].shape[2]
        if not self.layers or len(self.layers[0][0]) == at:
            self._grow(states, max(capacity, at + 1 + at // 4))
        for own, copied in zip(self.layers, states, strict=True):
            for entries, new in zip(own, copied, strict=True):
                entries[at, :, :length] = new[0]
        row.block = self
        row.at = at
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
        before = self.layers
        count = len(self.rows)
        self.layers = [
            (
                keys.new_zeros((capacity, keys.shape[1], self.slots, keys.shape[3])),
                values.new_zeros((capacity, values.shape[1], self.slots, values.shape[3])),
            )
            for keys, values in like
        ]
        for grown, kept in zip(self.layers, before, strict=False):  # none at first
            for entries, states in zip(grown, kept, strict=True):
                entries[:count] = states[:count]


class Running(NamedTuple):
    """The pass that is running, as the layers of the cache see it."""

    # Takes a layer's index and what it computed of the pass; returns what it hands to attention.
    write: Callable[[int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    end: int  # the entries of the longest row after the pass


class InPlaceLayer(DynamicLayer):
    """A layer of the cache that hands all keys and values to the pass."""

    def __init__(self, entries: InPlaceEntries, index: int) -> None:
        super().__init__()
        self._entries = entries
        self._index = index
        self._window = entries.windows[index]
        self.is_sliding = self._window is not None
        self._reached: Running | None = None  # the last pass that has written

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._reached = self._entries.running
        assert self._reached is not None
        return self._reached.write(self._index, key_states, value_states)

    def get_seq_length(self) -> int:
        running = self._entries.running  # until the accepted tokens are kept
        if running is not None and self._reached is running:
            return running.end
        return self._entries.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        start = min(row.begin(self._window) for row in self._entries.rows)
        return self._entries.length + query_length - start, start


class InPlaceEntries(Entries):
    """The entries of rows that each have a length of their own.

    Attributes:
        windows (`list`): The sliding window of each layer, or `None`.
        packs (`bool`): Whether rows stand one behind another in a pass, in any number of blocks;
            otherwise they stand in one block, in their order.
        rows (`list[RowEntries]`): The rows.
        running ([`Running`], *optional*): The pass whose accepted tokens are not yet kept.
    """

    def __init__(
        self, model: PreTrainedModel, model_kwargs: Mapping[str, Any], packs: bool
    ) -> None:
        super().__init__(find_cache(model_kwargs))
        self.windows = [getattr(layer, "sliding_window", None) for layer in new_cache(model).layers]
        self.packs = packs
        is_usual = model_kwargs.keys() <= USUAL_ARGUMENTS
        self.joins = packs and is_usual and not belongs_to_caller(self.cache)
        self.rows: list[RowEntries] = []
        self.running: Running | None = None
        self.compared = False  # whether a packed pass has attended to what it wrote
        self._blocks: dict[int, Block] = {}

    @property
    def variant(self) -> str:
        return "packed" if self.packs else "side by side"

    @property
    def length(self) -> int:
        """The length of the longest row."""
        return max((row.length for row in self.rows), default=0)

    def begin(
        self, prompt_length: int, model_kwargs: Mapping[str, Any], prompts: list[int]
    ) -> None:
        length = int(self.cache.get_seq_length())
        self.prior_length = length - prompt_length
        self._layers = self.cache.layers
        self.rows = _rows_of_prompts(model_kwargs, len(prompts), length)
        placed = list(zip(self.rows, prompts, strict=True))
        if self.packs:  # rows of like length then stand together, and attend in one call
            placed.sort(key=lambda row_and_prompt: row_and_prompt[0].skipped)
        for row, prompt in placed:
            states = [
                (
                    _whole(layer.keys[prompt], length)[None],
                    _whole(layer.values[prompt], length)[None],
                )
                for layer in self._layers
            ]
            self._add(row, states, capacity=len(prompts))
        for layer in self.cache.layers:  # their entries are handed over
            layer.keys = layer.values = None
        self.cache.layers = [InPlaceLayer(self, i) for i in range(len(self.cache.layers))]

    def before(self, now: Pass) -> None:
        for row, cached in zip(self.rows, now.cached, strict=True):
            row.length = cached + self.prior_length
        longest = self.length + now.size
        for row, size in zip(self.rows, now.sizes, strict=True):
            room = size if self.packs else longest - row.length
            if row.length + room > row.block.slots:  # it moves to a longer block
                before = row.block
                at = row.at
                self._add(row, row.first(row.length), room)
                before.remove(at)

    def keep(self, done: Pass, paths: Sequence[list[int] | None]) -> list[int]:
        kept = done.kept(paths)
        moved = {
            i: np.array(tokens) + row.length
            for i, (row, tokens) in enumerate(zip(self.rows, kept, strict=True))
            if tokens and tokens[-1] != len(tokens) - 1  # not in place: indices ascend
        }
        if moved:
            device = self.rows[0].block.layers[0][0].device
            for i, slots in uploaded(moved, device).items():
                self.rows[i].move(slots)
        for row, tokens in zip(self.rows, kept, strict=True):
            row.length += len(tokens)
        self.running = None
        return done.cached_after(paths)

    def undo(self) -> None:
        self.running = None

    def select(self, rows: list[int]) -> None:
        for i, row in enumerate(self.rows):
            if i not in rows:
                row.block.remove(row.at)
        self.rows = [self.rows[i] for i in rows]

    def join(self, other: InPlaceEntries) -> None:
        [row] = other.rows
        self._add(row, row.first(row.length), capacity=1)
        self.rows.append(row)
        other.rows = []
        other._blocks = {}

    def stop_packing(self, room: int) -> None:
        """Puts all rows in one block, in their order, with `room` tokens behind the longest."""
        self.packs = self.joins = False
        self._blocks = {}
        longest = self.length
        for row in self.rows:
            room_of_row = longest + room - row.length
            self._add(row, row.first(row.length), room_of_row, capacity=len(self.rows))

    def packed_order(self) -> list[int]:
        """The rows as a packed pass runs them: those of a block together, as they stand in it."""
        places = {id(row): i for i, row in enumerate(self.rows)}
        return [places[id(row)] for block in self._blocks.values() for row in block.rows]

    def cached_row(self, index: int, cached: int) -> LayerEntries:
        """The first keys and values of a row in each layer, `(1, heads, cached, head_dim)`; none
        where a layer's prefill has left out what is outside of its window."""
        if any(window is not None for window in self.windows):
            return []
        return self.rows[index].first(cached)

    def crop(self, length: int, excess: int) -> bool:
        if any(window is not None for window in self.windows):
            return False  # what the prefill left out may be seen again
        [row] = self.rows
        row.length = length + self.prior_length
        return True

    def close(self, cached: list[int]) -> None:
        if self.rows:
            self._put_back(max(cached) + self.prior_length)

    def mark(self) -> Callable[[], None]:
        lengths = [row.length for row in self.rows]
        before_prefill = None if self.rows else super().mark()

        def go_back() -> None:
            if before_prefill is None:
                for row, length in zip(self.rows, lengths, strict=True):
                    row.length = length
                return
            if self.rows:
                self._put_back(self.rows[0].length)
            before_prefill()

        return go_back

    def _add(self, row: RowEntries, states: LayerEntries, room: int = 0, capacity: int = 0) -> None:
        """Puts a row in the shortest block that has `room` tokens behind it."""
        slots = block_size(row.length + room)
        self._blocks.setdefault(slots, Block(slots)).add(row, states, capacity)

    def _put_back(self, length: int) -> None:
        """Fills the call's own layers with the first `length` entries of all rows, padding among
        them, as plain decoding leaves them."""
        for index, layer in enumerate(self._layers):
            window = layer.sliding_window if isinstance(layer, SlidingLayer) else None
            seen = slice(first_visible(length, window), length)
            layer.keys, layer.values = (
                torch.cat(
                    [row.block.layers[index][side][row.at, None, :, seen] for row in self.rows]
                )
                for side in (0, 1)
            )
            if window is not None:
                layer.cumulative_length = length
        self.cache.layers = self._layers
        self.rows = []
        self._blocks = {}


def fits_in_place(cache: Cache) -> bool:
    """Whether every layer keeps one entry for each position, or for those of a window."""
    return (
        all(type(layer) in (DynamicLayer, SlidingLayer) for layer in cache.layers)
        and len({layer.get_seq_length() for layer in cache.layers}) <= 1
        and not cache.offloading
    )


def first_visible(length: int, window: int | None) -> int:
    """The first of `length` entries that is inside of the next token's window."""
    return 0 if window is None else max(0, length - window + 1)


def block_size(length: int) -> int:
    """The slots of the shortest block for rows of this length."""
    slots = _SHORTEST
    while slots < length:
        slots += slots // 2
    return slots


def seen_entries(
    now: Pass,
    rows: Sequence[RowEntries],
    members: Sequence[int],
    size: int,
    entries: slice,
    window: int | None,
) -> np.ndarray:
    """Which of these entries of its row each of `size` tokens sees, of the rows that are `members`:
    bool `(members, size, length)`. A token sees its row up to the pass, then what the draft's mask
    allows, and nothing outside of the window. A token that a row lacks sees what its last one
    does."""
    start = entries.start
    seen = np.zeros((len(members), size, entries.stop - start), dtype=np.bool_)
    for mask, i in zip(seen, members, strict=True):
        row = rows[i]
        behind = row.length - start
        mask[:, :behind] = True
        count = now.sizes[i]
        if count == 0:
            continue
        own = mask[:count]
        own[:, behind : behind + count] = now.visible[i]
        own[:, : max(row.skipped - start, 0)] = False
        if row.hidden is not None:
            own[:, : max(len(row.hidden) - start, 0)] &= ~row.hidden[start:]
        if window is not None:
            steps = now.indices[i] - now.indices[i][0]
            distances = steps[:, None] - np.concatenate([np.arange(-behind, 0), steps])
            own[:, : behind + count] &= distances < window
        mask[count:] = own[-1]
    return seen


def _rows_of_prompts(model_kwargs: Mapping[str, Any], count: int, length: int) -> list[RowEntries]:
    """`count` rows whose prompts, with what a given cache holds, are `length` tokens long."""
    rows = [RowEntries(0, length) for _ in range(count)]
    if (mask := model_kwargs.get("attention_mask")) is not None:
        hidden = mask[:, :length].numpy(force=True) == 0
        padding = np.logical_and.accumulate(hidden, axis=1).sum(axis=1).tolist()
        for row, own, skipped in zip(rows, hidden, padding, strict=True):
            row.skipped = skipped
            row.hidden = own if own[skipped:].any() else None
    return rows


def _whole(entries: torch.Tensor, length: int) -> torch.Tensor:
    """Entries `(heads, n, head_dim)` in the slots of their indices: where a layer has dropped what
    is outside of its window, nothing is in the first ones of `length`."""
    gone = length - entries.shape[1]
    return nn.functional.pad(entries, (0, 0, gone, 0)) if gone else entries
