"""A static cache whose rows each write their tokens into slots of their own.

transformers' static layers write the tokens of a pass behind those of the pass before, in the same
slots of all rows, and cannot take any back. Here a pass says for each row and token in which slot
it goes: what was rejected stays where it is, no mask shows it, and the next pass writes over it.
Nodes of the accepted path that stand behind others move to their slots, in compiled calls within
the layers of the next pass, see [`SlottedLayer`]. The last slot of the cache is spare: padding that
has no room goes there. All layers read the slots from one object, so that a pass needs no step of
Python for each layer and compiles to one graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import StaticCache, StaticLayer

from .cache import Entries, EntriesMark, Pass
from .compiled import CompiledForward
from .model_memo import memo_of

# Caches have multiples of it as lengths, so that a slightly longer prompt compiles nothing new.
_LENGTH_STEP = 128
# Entries of a row that a compiled pass can move; longer paths that do not stand in order are rare.
_MOST_MOVED = 16
_KEPT_LAYERS = "layers of a static cache"


class Slots:
    """Where the tokens of the next pass go, shared by all layers."""

    targets: torch.Tensor  # int64 (R, S), the slot of each token of the pass
    # From where to where entries move before that, int64 (R, n); `None` where none ever do.
    moved: tuple[torch.Tensor, torch.Tensor] | None = None


class SlottedLayer(StaticLayer):
    """A layer that shares the tensors of a `StaticLayer`, which holds the prompt already, and
    writes where [`Slots`] says."""

    def __init__(self, layer: StaticLayer, slots: Slots) -> None:
        self.__dict__ |= layer.__dict__
        self.slots = slots

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        slots, device = self.slots, self.keys.device  # layers may be on several devices
        targets = slots.targets.to(device)
        if slots.moved is not None:
            self.move(*slots.moved)
        _write(self.keys, targets, key_states)
        _write(self.values, targets, value_states)
        return self.keys, self.values

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Moves each row's entries from slots to slots, int64 `(R, n)`."""
        sources, targets = sources.to(self.keys.device), targets.to(self.keys.device)
        for entries in (self.keys, self.values):
            _write(entries, targets, _read(entries, sources))


def _read(entries: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Copies entries `(R, heads, n, head_dim)` out of a layer."""
    if len(slots) == 1:
        return entries.index_select(2, slots[0])
    rows, heads, _, head_dim = entries.shape
    index = slots[:, None, :, None].expand(rows, heads, slots.shape[1], head_dim)
    return entries.gather(2, index)


def _write(entries: torch.Tensor, slots: torch.Tensor, states: torch.Tensor) -> None:
    """Writes states `(R, heads, n, head_dim)` into a layer."""
    if len(slots) == 1:
        entries.index_copy_(2, slots[0], states)
    else:
        entries.scatter_(2, slots[:, None, :, None].expand_as(states), states)


def has_begun(cache: StaticCache) -> bool:
    """Whether anything has been written into a static cache."""
    return int(cache.get_seq_length()) > 0


class SlottedEntries(Entries):
    """The slots of a static cache, each row's behind its own last token; `forward` is what runs
    over it, in passes up to the `widest`."""

    def __init__(self, cache: Any, forward: CompiledForward, widest: int, same_bits: bool) -> None:
        super().__init__(cache)
        self._forward, self._model, self._config = forward, forward.model, forward.config
        self._plain_layers = cache.layers
        if not has_begun(cache):
            # Also in place of layers that keep a window: a mask hides what is outside of it, and a
            # draft may be rejected behind it.
            length = self._wanted_length(widest, same_bits)
            cache.layers = [StaticLayer(max_cache_len=length) for _ in cache.layers]
            for old, layer in zip(self._plain_layers, cache.layers, strict=True):
                if old.is_initialized:  # ahead of a prefill in chunks, which may be compiled
                    layer.lazy_initialization(old.keys, old.values)
        self.length: int = cache.layers[0].max_cache_len  # the slots of a row
        self.slots = Slots()
        self._layers = cache.layers
        # The moves of the next pass: for each row, from these slots to those; and how many of its
        # tokens stand in place.
        self._moves: list[tuple[list[int], list[int]]] = []
        self._in_place: list[int] = []

    def _wanted_length(self, widest: int, same_bits: bool) -> int:
        """The length of a cache that has not begun: as it was given, or for the whole text and a
        pass behind it where `generate` has made it."""
        config = self._config
        longest = max(layer.max_cache_len for layer in self.cache.layers)
        if config.cache_implementation is None:
            return longest
        if same_bits:  # depend on the length, which earlier calls must not change
            longest = max(config.max_length, getattr(config, "max_cache_len", None) or 0)
        needed = max(longest, config.max_length) + widest
        return -(-needed // _LENGTH_STEP) * _LENGTH_STEP

    def reuse(self, rows: int) -> None:
        """Takes the layers that an earlier call has released, if they fit: a CUDA graph is bound to
        the memory that it was captured with."""
        if self._is_owned:
            shape, layers = memo_of(self._model).pop(_KEPT_LAYERS, (None, []))
            if shape == self.shape(rows):
                self._layers = self.cache.layers = layers

    def release(self, rows: int) -> None:
        """Keeps the layers of compiled passes for the next call."""
        if self._is_owned:
            for layer in self._layers:
                for tensor in (layer.keys, layer.values, layer.cumulative_length):
                    tensor.zero_()
            memo_of(self._model)[_KEPT_LAYERS] = self.shape(rows), self._layers

    def shape(self, rows: int) -> tuple[Any, ...]:
        """The properties that the layers of a cache depend on."""
        return self.length, rows, self._model.dtype, self._model.device

    @property
    def _is_owned(self) -> bool:
        """Whether `generate` made the cache of this compiled call and does not return it."""
        config = self._config
        made = config.cache_implementation is not None and not config.return_dict_in_generate
        return self._forward.is_active and made

    def ends(self, cached: Sequence[int]) -> list[int]:
        """The first free slot of each row."""
        return [n + self.given for n in cached]

    def begin(self, prompt_length: int) -> None:
        if len(self._layers) != len(self._plain_layers):  # Dory copies some, windows or not
            raise ValueError("the model adds layers of its own to a static cache")
        self.given = int(self.cache.get_seq_length()) - prompt_length
        self.cache.layers = [SlottedLayer(layer, self.slots) for layer in self._layers]

    def keep(self, done: Pass, paths: Sequence[list[int] | None]) -> list[int]:
        self._moves, self._in_place = [], []
        ends = self.ends(done.cached)
        for cached, end, kept in zip(done.cached, ends, done.kept(paths), strict=True):
            first = next((i for i, node in enumerate(kept) if i != node), len(kept))
            self._in_place.append(cached + first)
            sources = [end + node for node in kept[first:]]
            self._moves.append((sources, list(range(end + first, end + len(kept)))))
        most = max(len(sources) for sources, _ in self._moves)
        if not self._forward.is_active or most > _MOST_MOVED:
            self.move()
        return done.cached_after(paths)

    def undo(self, done: Pass) -> list[int]:
        if not any(sources for sources, _ in self._moves):
            return done.cached
        self._moves = []  # some layers have moved their entries, some have not
        return self._in_place

    def move(self) -> None:
        """Moves now what the last pass has left to the next one."""
        if any(sources for sources, _ in self._moves):
            moves = [torch.from_numpy(each) for each in self.moves(len(self._moves))]
            for layer in self.cache.layers:
                layer.move(*moves)
        self.moved()

    def moved(self) -> None:
        """Nothing is left to move: a pass has done so."""
        self._moves = []

    def moves(self, rows: int) -> list[np.ndarray]:
        """From where to where entries move, int64 `(R, n)`: what a row does not fill is the first
        slot, which stays where it is."""
        moves = self._moves or [([], [])] * rows
        count = max(_MOST_MOVED, *(len(sources) for sources, _ in moves))
        padded = np.zeros((2, len(moves), count), dtype=np.int64)
        for row, sides in enumerate(moves):
            for side, slots in zip(padded, sides, strict=True):
                side[row, : len(slots)] = slots
        return list(padded)

    def close(self, cached: list[int]) -> None:
        self.move()
        self.cache.layers = self._layers
        if not cached:
            return
        length = max(self.ends(cached))
        for layer in self._layers:
            layer.cumulative_length.fill_(length)
        # Plain decoding would have left shorter layers, or ones that keep a window.
        self.cache.layers = []
        for layer, plain in zip(self._layers, self._plain_layers, strict=True):
            shape = type(layer), layer.max_cache_len
            if layer is not plain and (type(plain), plain.max_cache_len) != shape:
                plain.update(layer.keys[:, :, :length], layer.values[:, :, :length])
                self.cache.layers.append(plain)
            else:
                self.cache.layers.append(layer)

    def mark(self) -> EntriesMark:
        self.move()
        return EntriesMark()  # no mask shows the entries behind the rows

    def roll_back(self, mark: EntriesMark) -> None:
        self.moved()
