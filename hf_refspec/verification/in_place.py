"""Keys and values in place: each pass writes behind the rows, where transformers' cache copies all
that it holds in every pass.

The layers of a call's cache are taken in after the prefill. From then on a layer with a sliding
window keeps all entries, each in the slot of its index, and masks hide what is outside of the
window: so drafts may branch and be rejected behind it. A cache that is returned is filled in the
end as plain decoding would have left it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn
from transformers import Cache, DynamicLayer

from ..transformers_names import SlidingLayer
from .cache import Entries, EntriesMark, Pass
from .row_blocks import RowBlocks, RowEntries


def fits_in_place(cache: Cache) -> bool:
    """Whether every layer keeps one entry for each position, or for those of a window."""
    return (
        all(type(layer) in (DynamicLayer, SlidingLayer) for layer in cache.layers)
        and len({layer.get_seq_length() for layer in cache.layers}) <= 1
        and not cache.offloading
    )


def first_visible(length: int, window: int | None) -> int:
    """The first of `length` entries that the next token sees."""
    return 0 if window is None else max(0, length - window + 1)


class RunningPass(Protocol):
    """The pass that layers write for."""

    end: int  # the length of the longest row with its tokens

    def update(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes what a layer computed of the pass, and returns what it hands to attention."""

    def check_attended(self) -> None:
        """Makes sure that each layer has attended to what it has written, if that matters."""


class SideBySide:
    """A pass `(R, S)` whose rows stand side by side, under the model's own attention."""

    def __init__(self, entries: InPlaceEntries, size: int) -> None:
        self._block = entries.rows[0].block
        self._windows = entries.windows
        ends = [row.length for row in entries.rows]
        self._count, self._size, self._begin = len(ends), size, min(ends)
        self.end = max(ends) + size
        self._at, self._slots = torch.arange(len(ends))[:, None], torch.tensor(ends)[:, None]
        self._slots = self._slots + torch.arange(size)
        self._even = min(ends) == max(ends)

    def update(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        seen = slice(first_visible(self._begin, self._windows[layer]), self.end)
        entries = self._block.layers[layer]
        for own, new in zip(entries, (keys, values), strict=True):
            if self._even:
                own[: self._count, :, self._begin : self.end] = new
            else:
                at, slots = self._at.to(own.device), self._slots.to(own.device)
                own.transpose(1, 2)[at, slots] = new.transpose(1, 2)
        return entries[0][: self._count, :, seen], entries[1][: self._count, :, seen]

    def check_attended(self) -> None:
        pass


class InPlaceLayer(DynamicLayer):
    """A layer of the cache that hands all keys and values to the pass."""

    def __init__(self, entries: InPlaceEntries, index: int) -> None:
        super().__init__()
        self._entries, self._index = entries, index
        self._window = entries.windows[index]
        self.is_sliding = self._window is not None
        self._reached: RunningPass | None = None  # the last pass that has written

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
        length = self._entries.length
        start = first_visible(length, self._window)
        return length + query_length - start, start


class InPlaceEntries(Entries):
    """The entries of rows of one block, which stand in order and have room for the same length;
    `windows` are those of the layers."""

    running: RunningPass | None = None

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
        self.given = int(self.cache.get_seq_length()) - prompt_length
        self._layers = self.cache.layers
        for index in range(len(self._layers[0].keys)):
            self._take_in(self._layers, index, 0, len(self._layers[0].keys))
        self.replace_layers()

    def before(self, now: Pass) -> None:
        longest = max(now.cached) + self.given + now.size
        for row, cached in zip(self.rows, now.cached, strict=True):
            row.length = cached + self.given
            self.blocks.make_room(row, longest - row.length)

    def keep(self, done: Pass, paths: Sequence[list[int] | None]) -> list[int]:
        for row, nodes in zip(self.rows, done.kept(paths), strict=True):
            row.keep(nodes)
        self.running = None
        return done.cached_after(paths)

    def undo(self, done: Pass) -> list[int]:
        self.running = None
        return done.cached

    def select(self, rows: list[int], cached: list[int]) -> None:
        for i, row in enumerate(self.rows):
            if i not in rows:
                row.block.remove(row.at)
        self.rows = [self.rows[i] for i in rows]

    def crop(self, length: int, excess: int) -> bool:
        if any(window is not None for window in self.windows):
            return False  # what the prefill left out may be seen again
        [row] = self.rows
        row.length = length + self.given
        return True

    def close(self, cached: list[int]) -> None:
        if self.rows:
            self._put_back(max(cached) + self.given)

    def mark(self) -> EntriesMark:
        if not self.rows:
            return super().mark()
        return EntriesMark(lengths=[row.length for row in self.rows])

    def roll_back(self, mark: EntriesMark) -> None:
        if mark.lengths is not None:
            for row, length in zip(self.rows, mark.lengths, strict=True):
                row.length = length
            return
        if self.rows:  # to before the prefill
            self._put_back(self.length)
        super().roll_back(mark)

    def _take_in(self, layers: Sequence[Any], index: int, skipped: int, count: int) -> None:
        """Adds a row of a cache; where a layer has dropped what is outside of its window, nothing
        is in these slots."""
        length = max(layer.get_seq_length() for layer in layers)
        states = []
        for layer in layers:
            kept = layer.keys[index : index + 1], layer.values[index : index + 1]
            gone = length - layer.keys.shape[2]
            keys, values = (
                (nn.functional.pad(each, (0, 0, gone, 0)) if gone else each)[:, :, skipped:]
                for each in kept
            )
            states.append((keys, values))
        row = RowEntries(skipped, length - skipped)
        self.blocks.add(row, states, capacity=count)
        self.rows.append(row)

    def replace_layers(self) -> None:
        """Hands the layers' entries over, which they no longer hold."""
        for layer in self.cache.layers:
            layer.keys = layer.values = None
        self.cache.layers = [InPlaceLayer(self, i) for i in range(len(self.cache.layers))]

    def _put_back(self, length: int) -> None:
        """Fills the call's own layers with the first entries, as plain decoding leaves them."""
        count, block = len(self.rows), self.rows[0].block
        for layer, entries in zip(self._layers, block.layers, strict=True):
            window = layer.sliding_window if isinstance(layer, SlidingLayer) else None
            kept = slice(first_visible(length, window), length)
            layer.keys, layer.values = (each[:count, :, kept].clone() for each in entries)
            if window is not None:
                layer.cumulative_length = length
        self.cache.layers = self._layers
        self.rows, self.blocks = [], RowBlocks()
