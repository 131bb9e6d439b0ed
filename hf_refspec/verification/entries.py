"""A call's cache keeps the keys and values of accepted tokens and drops the others.

| entries | a rejected branch is dropped |
| --- | --- |
| [`InPlaceEntries`] | by `keep`: accepted nodes move up to their row, whose length ends there |
| [`~in_order.CroppedEntries`] | by `keep`: the end of the cache is cropped |
| [`~in_order.RunningState`] | by `keep`: the state from before the pass is restored |
| [`~slots.SlottedEntries`] | by `keep`: its slots are free again |

**In place**, each pass writes after the rows, where transformers' cache copies all that it holds in
every pass. The layers of a call's cache are taken in after the prefill. From then on a layer with a
sliding window keeps all tokens, each in the slot of its index, and masks hide what is outside of
it, so that drafts may branch there too. A cache that is returned is filled in the end as plain
decoding would have left it. Rows of like length are in one block, so that they attend in one call;
a row that outgrows its block moves to the next longer one:

    block of 256 slots   p p p x x x r d _ _        p  prompt, x  output
                         p p x x r d d d _ _        r  root, d  draft nodes
    block of 576 slots   p p p p p p p p x x r d _ _ _ _ _
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from transformers import Cache, DynamicLayer, GenerationConfig, PreTrainedModel

from ..transformers_names import USUAL_ARGUMENTS, SlidingLayer, belongs_to_caller
from .caches import (
    KeysAndValues,
    attends_packed,
    crop_layers,
    find_cache,
    keeps_every_position,
    new_cache,
    restore,
    snapshot,
)
from .model_memo import memo_of
from .passes import Pass, Prefill, UnverifiableError, uploaded

# The slots of a row in the shortest block; each block is half as long again as the one before.
_SHORTEST = 256
_UNPACKABLE = "attends to something else than it caches"


class Entries:
    """A cache that is only added to: no draft was ever run over it.

    Attributes:
        cache (`Cache`, *optional*): The call's; a model may replace it.
        prior_length (`int`): The tokens before the prompt: a given cache may hold more than the
            ids.
    """

    # True if accepted tokens run again in the next pass.
    reruns = False
    # True if rows of other calls may join; a prompt that several rows have then runs once.
    joins = False
    # True if a pass costs as much as all its tokens; else each row costs as much as the widest.
    packs = False
    # Distinguishes passes of different cost within a kind of verifier.
    variant = ""

    def __init__(
        self,
        model: PreTrainedModel,
        generation_config: GenerationConfig,
        model_kwargs: Mapping[str, Any],
    ) -> None:
        """The arguments of a [`Verifier`]; subclasses need them."""
        self.cache: Any = find_cache(model_kwargs)
        self.prior_length = 0

    def before_prefill(self, count: int) -> None:
        """Prepares for the prompts of this number of rows."""

    def begin(self, prefill: Prefill) -> None:
        """Prepares for drafts."""

    def replace(self, cache: Cache) -> None:
        """Takes over the cache that a model has begun, as some do in the middle of a text."""
        self.cache = cache

    def before(self, pass_: Pass) -> None:
        """Prepares for a pass."""

    def keep(self, pass_: Pass, paths: Sequence[list[int] | None]) -> list[int]:
        """Keeps each row's pending tokens and the nodes of its path, see [`Verifier.keep`]; returns
        how many tokens of each row the cache holds then."""
        if None in paths:
            raise ValueError("the cache of this model can drop nothing of a pass")
        return pass_.cached_after(paths)

    def undo(self) -> None:
        """Removes a pass that raised from the layers that it had reached."""

    def room(self, cached: Sequence[int]) -> int:
        """The most draft nodes of a row that the next pass can take."""
        return sys.maxsize

    def select(self, rows: list[int]) -> None:
        """Drops all rows but these."""
        raise NotImplementedError(f"{type(self).__name__} keep all of their rows")

    def join(self, other: Any) -> None:
        """Adds the only row of other entries of this type, which are then empty."""
        raise NotImplementedError(f"{type(self).__name__} take no further row")

    def lengths_to_finish(self, cached: list[int], length: int) -> list[int]:
        """The length of each row that stays before the last pass brings all rows to this length."""
        return cached

    def keys_and_values(self) -> KeysAndValues:
        """The keys and values of a single row in each layer that keeps some,
        `(1, heads, length, head_dim)`, without the tokens that a sliding window has left out."""
        return [(layer.keys, layer.values) for layer in self.cache.layers]

    def close(self, cached: list[int]) -> None:
        """Ends a call whose cache is returned: crops it to these tokens and restores its layers."""

    def release(self) -> None:
        """Ends a call whose cache is not returned."""

    def mark(self) -> Callable[[], None]:
        """A function that goes back to the present, any number of times."""
        cache = self.cache
        if cache is None:
            return lambda: None
        states = None if keeps_every_position(cache) else snapshot(cache)
        length = 0 if states is not None else cache.get_seq_length()

        def go_back() -> None:
            self.cache = cache  # the model may have begun a new one
            if states is None:
                crop_layers(cache, length)
            else:
                restore(cache, states)

        return go_back


class CachedRow:
    """A row of a block: its first `length` slots are kept, and a pass writes after them. The first
    `padding` of them hold padding, which no token sees."""

    block: Block
    at: int  # its place in the block

    def __init__(self, padding: int, length: int, hidden: np.ndarray | None = None) -> None:
        self.length = length
        self.padding = padding
        self.hidden = hidden  # true for each hidden slot, where not only the `padding` is hidden

    def place(self, block: Block, at: int) -> None:
        """Puts it into a block, at this index."""
        self.block = block
        self.at = at

    def keep(self, length: int, moved: torch.Tensor | None = None) -> None:
        """Keeps its first slots, up to this length: a rejected branch ends here. The contents of
        `moved` slots, int64 `(n,)`, come after what it had kept."""
        if moved is not None:
            for layer in self.block.layers:
                slots = moved.to(layer[0].device, non_blocking=True)
                for tensor in layer:
                    row = tensor[self.at]
                    row[:, self.length : self.length + len(slots)] = row.index_select(1, slots)
        self.length = length

    def first_slot(self, window: int | None) -> int:
        """The first slot that the next token sees."""
        return max(self.padding, first_in_window(self.length, window))

    def mask(
        self, pass_: Pass, index: int, size: int, slots: slice, window: int | None
    ) -> np.ndarray:
        """The mask of `size` tokens of this row of a pass over these slots, bool `(size, slots)`:
        each sees the row up to the pass, then what the draft's mask allows, and nothing outside of
        the window. A token that the row lacks sees what its last one does."""
        before = self.length - slots.start
        count = pass_.sizes[index]
        mask = np.zeros((size, slots.stop - slots.start), dtype=np.bool_)
        mask[:, :before] = True
        if count == 0:
            return mask
        tokens = mask[:count]
        tokens[:, before : before + count] = pass_.masks[index]
        tokens[:, : max(self.padding - slots.start, 0)] = False
        if self.hidden is not None:
            tokens[:, : max(len(self.hidden) - slots.start, 0)] &= ~self.hidden[slots.start :]
        if window is not None:
            steps = pass_.indices[index] - pass_.indices[index][0]
            distances = steps[:, None] - np.concatenate([np.arange(-before, 0), steps])
            tokens[:, : before + count] &= distances < window
        mask[count:] = tokens[-1]
        return mask

    def first(self, length: int) -> KeysAndValues:
        """The contents of its first slots in each layer, `(1, heads, length, head_dim)`."""
        kept = slice(self.at, self.at + 1), slice(None), slice(length)
        return [(keys[kept], values[kept]) for keys, values in self.block.layers]


class Block:
    """Rows of up to `slots_per_row` tokens. Their keys and values in each layer are tensors
    `(capacity, heads, slots_per_row, head_dim)`, of which the first rows are taken."""

    def __init__(self, slots_per_row: int) -> None:
        self.slots_per_row = slots_per_row
        self.rows: list[CachedRow] = []
        self.layers: list[tuple[torch.Tensor, ...]] = []

    def add(self, row: CachedRow, contents: KeysAndValues, capacity: int) -> None:
        """Copies a row in, with the contents `(1, heads, n, head_dim)` of its first slots; where
        there is no room, room is made for `capacity` rows."""
        at = len(self.rows)
        if not self.layers or len(self.layers[0][0]) == at:
            self._grow(contents, max(capacity, at + 1 + at // 4))
        for layer, copied in zip(self.layers, contents, strict=True):
            for tensor, new in zip(layer, copied, strict=True):
                tensor[at, :, : new.shape[2]] = new[0]
        row.place(self, at)
        self.rows.append(row)

    def remove(self, at: int) -> None:
        """Removes the row at this index; later rows move up."""
        del self.rows[at]
        end = len(self.rows)
        for layer in self.layers if at < end else []:
            for tensor in layer:
                tensor[at:end] = tensor[at + 1 : end + 1].clone()
        for row in self.rows[at:]:
            row.place(self, row.at - 1)
        if not self.rows:
            self.layers = []

    def _grow(self, like: KeysAndValues, capacity: int) -> None:
        """Makes room for `capacity` rows. New slots are zero, so that no mask has to hide a NaN."""
        before = self.layers
        count = len(self.rows)
        self.layers = [
            tuple(
                states.new_zeros((capacity, states.shape[1], self.slots_per_row, states.shape[3]))
                for states in layer
            )
            for layer in like
        ]
        for grown, kept in zip(self.layers, before, strict=False):  # none at first
            for tensor, old in zip(grown, kept, strict=True):
                tensor[:count] = old[:count]


class LayerWriter(Protocol):
    """The pass that is running, as the layers of the cache see it.

    Attributes:
        end (`int`): The length of the longest row after the pass.
        compares (`bool`): True if layers must attend to the very keys and values that they write.
    """

    end: int
    compares: bool

    def write(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes a layer's keys and values of the pass; returns those that attention is given."""


class InPlaceLayer(DynamicLayer):
    """A layer of the cache that hands all keys and values to the pass."""

    def __init__(self, entries: InPlaceEntries, index: int) -> None:
        super().__init__()
        self._entries = entries
        self._index = index
        self._window = entries.window_of_layer[index]
        self.is_sliding = self._window is not None
        self._reached: LayerWriter | None = None  # the last pass that has written

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        entries = self._entries
        states: Sequence[torch.Tensor] = (key_states, value_states)
        kept = entries.rows[0].block.layers[self._index]
        if any(new.dtype != old.dtype for new, old in zip(states, kept, strict=True)):
            states = entries.widened(self._index, states)
        self._reached = entries.current
        assert self._reached is not None
        return self._reached.write(self._index, *states)

    def get_seq_length(self) -> int:
        current = self._entries.current  # until the accepted tokens are kept
        if current is not None and self._reached is current:
            return current.end
        return self._entries.longest

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        start = min(row.first_slot(self._window) for row in self._entries.rows)
        return self._entries.longest + query_length - start, start


class InPlaceEntries(Entries):
    """The keys and values of rows that each have a length of their own.

    Attributes:
        window_of_layer (`list`): The sliding window of each layer, or `None`.
        packs (`bool`): True if the rows of a pass follow one another, and are in any number of
            blocks; otherwise they are in one block, in their order.
        rows (`list[CachedRow]`): The rows.
        current ([`LayerWriter`], *optional*): The pass whose accepted tokens are not yet kept.
        compared (`bool`): True once a packed pass has attended to what it wrote.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        generation_config: GenerationConfig,
        model_kwargs: Mapping[str, Any],
    ) -> None:
        super().__init__(model, generation_config, model_kwargs)
        self._model = model
        self.window_of_layer: list[int | None] = []
        is_usual = model_kwargs.keys() <= USUAL_ARGUMENTS
        by_row = (model_kwargs.get(name) for name in ("attention_mask", "position_ids"))
        has_one_row = all(value is None or value.shape[-2] == 1 for value in by_row)
        self.packs = (
            (is_usual or has_one_row)
            and attends_packed(model)
            and _UNPACKABLE not in memo_of(model)
        )
        self.joins = self.packs and is_usual and not belongs_to_caller(self.cache)
        self.variant = "packed" if self.packs else "side by side"
        self.rows: list[CachedRow] = []
        self.current: LayerWriter | None = None
        self.compared = False
        self._blocks: dict[int, Block] = {}

    @property
    def longest(self) -> int:
        """The length of the longest row."""
        return max((row.length for row in self.rows), default=0)

    def sees_all(self, pass_: Pass) -> bool:
        """True if a pass is the next tokens of equally long rows, without drafts, each of which
        sees all before it: the very step of plain decoding, or several tokens of it at once."""
        return (
            min(pass_.pending) == pass_.size
            and len({(row.length, row.padding) for row in self.rows}) == 1
            and all(row.hidden is None for row in self.rows)
        )

    def begin(self, prefill: Prefill) -> None:
        self._cache_layers = self.cache.layers
        # A model may have lost layers; one that runs some again may have added to them (Dory).
        written = [i for i, layer in enumerate(self._cache_layers) if layer.keys is not None]
        if not written:
            raise UnverifiableError("it writes nothing into its cache")
        self._layers = [self._cache_layers[i] for i in written]
        # A given cache may know nothing of windows.
        own = new_cache(self._model).layers
        layers = [*own, *self._cache_layers[len(own) :]]
        self.window_of_layer = [getattr(layers[i], "sliding_window", None) for i in written]
        length = int(self._layers[0].get_seq_length())
        self.prior_length = length - prefill.prompt_length
        self.rows = _rows_of_prompts(prefill.model_kwargs, len(prefill.prompts), length)
        placed = list(zip(self.rows, prefill.prompts, strict=True))
        if self.packs:  # rows of similar length are then together, and attend in one call
            placed.sort(key=lambda row_and_prompt: row_and_prompt[0].padding)
        for row, prompt in placed:
            contents: KeysAndValues = [
                tuple(_whole(states[prompt], length)[None] for states in (layer.keys, layer.values))
                for layer in self._layers
            ]
            self._add(row, contents, capacity=len(placed))
        for layer in self._layers:
            layer.keys = layer.values = None
        self.cache.layers = [*self._cache_layers]
        for place, i in enumerate(written):
            self.cache.layers[i] = InPlaceLayer(self, place)

    def before(self, pass_: Pass) -> None:
        for row, cached in zip(self.rows, pass_.cached, strict=True):
            row.keep(cached + self.prior_length)
        longest = self.longest + pass_.size
        for row, size in zip(self.rows, pass_.sizes, strict=True):
            room = size if self.packs else longest - row.length
            if row.length + room > row.block.slots_per_row:  # it moves to a longer block
                before = row.block
                at = row.at
                self._add(row, row.first(row.length), room)
                before.remove(at)

    def widened(self, layer: int, states: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """New keys and values in the wider of their type and the cache's, which takes it on, as
        `torch.cat` does: a call under autocast may go on from the cache of another."""
        both = zip(states, self.rows[0].block.layers[layer], strict=True)
        types = [torch.promote_types(new.dtype, old.dtype) for new, old in both]
        for block in self._blocks.values():
            if block.rows:
                pairs = zip(block.layers[layer], types, strict=True)
                block.layers[layer] = tuple(tensor.to(dtype) for tensor, dtype in pairs)
        return [new.to(dtype) for new, dtype in zip(states, types, strict=True)]

    def write_by(self, writer: LayerWriter) -> None:
        """Lets layers write by this pass until its accepted tokens are kept."""
        self.current = writer

    def keep(self, pass_: Pass, paths: Sequence[list[int] | None]) -> list[int]:
        kept = pass_.kept(paths)
        moved = {
            row: np.array(tokens) + row.length
            for row, tokens in zip(self.rows, kept, strict=True)
            if tokens and tokens[-1] != len(tokens) - 1  # not in place: indices ascend
        }
        slots = uploaded(moved, self.rows[0].block.layers[0][0].device) if moved else {}
        for row, tokens in zip(self.rows, kept, strict=True):
            row.keep(row.length + len(tokens), slots.get(row))
        self.compared |= self.current is not None and self.current.compares
        self.current = None
        return [row.length - self.prior_length for row in self.rows]

    def undo(self) -> None:
        self.current = None

    def select(self, rows: list[int]) -> None:
        kept = [self.rows[i] for i in rows]
        for row in self.rows:
            if row not in kept:
                row.block.remove(row.at)
        self.rows = kept

    def join(self, other: InPlaceEntries) -> None:
        row = other.leave()
        self._add(row, row.first(row.length), capacity=1)
        self.rows.append(row)

    def leave(self) -> CachedRow:
        """The only row, which other entries take."""
        [row] = self.rows
        self.rows = []
        self._blocks = {}
        return row

    def stop_packing(self, room: int) -> None:
        """Puts all rows in one block, in their order, with `room` slots after the longest: the
        model does not attend to what it caches, and no later pass is packed either."""
        memo_of(self._model)[_UNPACKABLE] = True
        self.packs = self.joins = False
        self._blocks = {}
        longest = self.longest
        for row in self.rows:
            room_of_row = longest + room - row.length
            self._add(row, row.first(row.length), room_of_row, capacity=len(self.rows))

    def cached_row(self, index: int, cached: int) -> KeysAndValues:
        """The first keys and values of a row in each layer, `(1, heads, cached, head_dim)`; none
        where the prefill has left out tokens outside of a window."""
        return [] if any(self.window_of_layer) else self.rows[index].first(cached)

    def keys_and_values(self) -> KeysAndValues:
        [row] = self.rows
        firsts = map(row.first_slot, self.window_of_layer)
        layers = zip(row.first(row.length), firsts, strict=True)
        return [(keys[:, :, first:], values[:, :, first:]) for (keys, values), first in layers]

    def close(self, cached: list[int]) -> None:
        """Fills the call's own layers with all rows' first tokens, padding among them."""
        if not self.rows:
            return
        length = max(cached) + self.prior_length
        for index, layer in enumerate(self._layers):
            window = layer.sliding_window if isinstance(layer, SlidingLayer) else None
            slots = slice(first_in_window(length, window), length)
            layer.keys, layer.values = (
                torch.stack([row.block.layers[index][i][row.at, :, slots] for row in self.rows])
                for i in (0, 1)
            )
            if window is not None:
                layer.cumulative_length = length
        self.cache.layers = self._cache_layers
        self.rows = []
        self._blocks = {}

    def mark(self) -> Callable[[], None]:
        lengths = [row.length for row in self.rows]
        before_prefill = None if self.rows else super().mark()

        def go_back() -> None:
            self.current = None
            if before_prefill is None:
                for row, length in zip(self.rows, lengths, strict=True):
                    row.keep(length)
                return
            self.close([row.length - self.prior_length for row in self.rows])
            before_prefill()

        return go_back

    def _add(self, row: CachedRow, held: KeysAndValues, room: int = 0, capacity: int = 0) -> None:
        """Puts a row in the shortest block that has `room` slots after it."""
        slots = block_size(row.length + room)
        self._blocks.setdefault(slots, Block(slots)).add(row, held, capacity)


def first_in_window(length: int, window: int | None) -> int:
    """The first of `length` slots that is inside of the next token's window."""
    return 0 if window is None else max(0, length - window + 1)


def block_size(length: int) -> int:
    """The slots of the shortest block for rows of this length."""
    slots = _SHORTEST
    while slots < length:
        slots += slots // 2
    return slots


def _rows_of_prompts(model_kwargs: Mapping[str, Any], count: int, length: int) -> list[CachedRow]:
    """`count` rows whose prompts, with what a given cache holds, are `length` tokens long."""
    mask = model_kwargs.get("attention_mask")
    if mask is None:
        return [CachedRow(0, length) for _ in range(count)]
    hidden = (mask[:, :length] == 0).numpy(force=True)
    paddings = np.logical_and.accumulate(hidden, axis=1).sum(axis=1).tolist()
    return [
        CachedRow(padding, length, is_hidden if is_hidden[padding:].any() else None)
        for is_hidden, padding in zip(hidden, paddings, strict=True)
    ]


def _whole(states: torch.Tensor, length: int) -> torch.Tensor:
    """Keys or values `(heads, n, head_dim)` in the slots of their indices: the first of `length`
    are empty where a layer has dropped what is outside of its window."""
    gone = length - states.shape[1]
    return nn.functional.pad(states, (0, 0, gone, 0)) if gone else states
