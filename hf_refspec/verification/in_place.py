"""Keys and values in place: each pass writes behind the rows, where transformers' cache copies all
that it holds in every pass.

The layers of a call's cache are taken in after the prefill. From then on a layer with a sliding
window keeps all entries, each in the slot of its index, and masks hide what is outside of the
window: so drafts may branch and be rejected behind it. A cache that is returned is filled in the
end as plain decoding would have left it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import Cache, DynamicLayer

from ..transformers_names import SlidingLayer
from .cache import Entries, Pass
from .packed_attention import PackedPass
from .row_blocks import RowBlocks, RowEntries, first_visible
from .row_pass import RowPass, seen_entries


def fits_in_place(cache: Cache) -> bool:
    """Whether every layer keeps one entry for each position, or for those of a window."""
    return (
        all(type(layer) in (DynamicLayer, SlidingLayer) for layer in cache.layers)
        and len({layer.get_seq_length() for layer in cache.layers}) <= 1
        and not cache.offloading
    )


class SideBySide:
    """A pass `(R, S)` whose rows stand side by side in one block, under the model's own
    attention."""

    def __init__(self, rows: Sequence[RowPass], windows: Sequence[int | None], size: int) -> None:
        self._rows, self._windows, self._size = rows, windows, size
        begins = [row.entries.length for row in rows]
        self._begin = begins[0] if min(begins) == max(begins) else None  # of all rows
        self.end = max(begins) + size  # of the longest row
        slots = torch.tensor(begins)[:, None] + torch.arange(size)
        self._targets = torch.arange(len(rows))[:, None], slots

    def _entries(self, window: int | None) -> slice:
        """The entries that some token sees."""
        return slice(min(row.entries.begin(window) for row in self._rows), self.end)

    def seen(self, window: int | None) -> np.ndarray:
        """Which of these each token sees, bool `(R, S, length)`."""
        return seen_entries(self._rows, self._size, self._entries(window), window)

    def update(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes what a layer computed of the pass, and returns what it hands to attention."""
        count, seen = len(self._rows), self._entries(self._windows[layer])
        entries = self._rows[0].entries.block.layers[layer]
        for own, new in zip(entries, (keys, values), strict=True):
            if self._begin is not None:
                own[:count, :, self._begin : self.end] = new
            else:
                at, slots = (index.to(own.device) for index in self._targets)
                own.transpose(1, 2)[at, slots] = new.transpose(1, 2)
        return entries[0][:count, :, seen], entries[1][:count, :, seen]


class InPlaceLayer(DynamicLayer):
    """A layer of the cache that hands all keys and values to the pass."""

    def __init__(self, entries: InPlaceEntries, index: int) -> None:
        super().__init__()
        self._entries, self._index = entries, index
        self._window = entries.windows[index]
        self.is_sliding = self._window is not None
        self._reached: PackedPass | SideBySide | None = None  # the last pass that has written

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._reached = self._entries.running
        assert self._reached is not None
        return self._reached.update(self._index, key_states, value_states)

    def get_seq_length(self) -> int:
        running = self._entries.running  # until the accepted tokens are kept
        if running is not None and self._reached is running:
            return running.end
        return self._entries.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        start = min(row.begin(self._window) for row in self._entries.rows)
        return self._entries.length + query_length - start, start


class InPlaceEntries(Entries):
    """The entries of rows that each have a length of their own; `windows` are those of the
    layers."""

    running: PackedPass | SideBySide | None = None
    apart = False  # whether rows may stand in several blocks
    # The rows of the prefill, each with the index of its prompt, see `Verifier.prompts`.
    prefilled: list[tuple[RowEntries, int]]

    def __init__(self, cache: Any, windows: Sequence[int | None]) -> None:
        super().__init__(cache)
        self.windows = windows
        self.rows: list[RowEntries] = []
        self.blocks = RowBlocks()

    @property
    def length(self) -> int:
        """The length of the longest row."""
        return max((row.length for row in self.rows), default=0)

    def begin(self, prompt_length: int) -> None:
        length = int(self.cache.get_seq_length())
        self.given = length - prompt_length
        self._layers = self.cache.layers
        placed = self.prefilled
        if self.apart:  # rows of like length then stand together, and attend in one call
            placed = sorted(placed, key=lambda each: each[0].skipped)
        for row, prompt in placed:
            states = [
                (
                    _whole(layer.keys[prompt], length)[None],
                    _whole(layer.values[prompt], length)[None],
                )
                for layer in self._layers
            ]
            self.blocks.add(row, states, capacity=len(self.prefilled))
        self.rows = [row for row, _ in self.prefilled]
        for layer in self.cache.layers:  # their entries are handed over
            layer.keys = layer.values = None
        self.cache.layers = [InPlaceLayer(self, i) for i in range(len(self.cache.layers))]

    def before(self, now: Pass) -> None:
        for row, cached in zip(self.rows, now.cached, strict=True):
            row.length = cached + self.given
        longest = self.length + now.size
        for row, pending, draft in zip(self.rows, now.pending, now.drafts, strict=True):
            room = pending + len(draft) if self.apart else longest - row.length
            self.blocks.make_room(row, room)

    def keep(self, done: Pass, paths: Sequence[list[int] | None]) -> list[int]:
        for row, nodes in zip(self.rows, done.kept(paths), strict=True):
            row.keep(nodes)
        self.running = None
        return done.cached_after(paths)

    def undo(self) -> None:
        self.running = None

    def select(self, rows: list[int]) -> None:
        """Drops all rows but these."""
        for i, row in enumerate(self.rows):
            if i not in rows:
                row.block.remove(row.at)
        self.rows = [self.rows[i] for i in rows]

    def join(self, other: InPlaceEntries) -> None:
        """Adds the only row of other entries, which are then empty."""
        [row] = other.rows
        self.blocks.add(row, row.first(row.length), capacity=1)
        self.rows.append(row)
        other.rows, other.blocks = [], RowBlocks()

    def bring_together(self, room: int) -> None:
        """Puts all rows in one block, in their order, with `room` tokens behind the longest."""
        self.apart, self.blocks = False, RowBlocks()
        longest = self.length
        for row in self.rows:
            room_of_row = longest + room - row.length
            self.blocks.add(row, row.first(row.length), room_of_row, capacity=len(self.rows))

    def order(self) -> list[int]:
        """The rows as a packed pass runs them: those of a block together, as they stand in it."""
        places = {id(row): i for i, row in enumerate(self.rows)}
        return [places[id(row)] for block in self.blocks.blocks() for row in block.rows]

    def crop(self, length: int, excess: int) -> bool:
        if any(window is not None for window in self.windows):
            return False  # what the prefill left out may be seen again
        [row] = self.rows
        row.length = length + self.given
        return True

    def close(self, cached: list[int]) -> None:
        if self.rows:
            self._put_back(max(cached) + self.given)

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
        self.rows, self.blocks = [], RowBlocks()


def _whole(entries: torch.Tensor, length: int) -> torch.Tensor:
    """Entries `(heads, n, head_dim)` in the slots of their indices: where a layer has dropped what
    is outside of its window, nothing is in the first ones of `length`."""
    gone = length - entries.shape[1]
    return nn.functional.pad(entries, (0, 0, gone, 0)) if gone else entries
