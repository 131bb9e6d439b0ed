"""A static cache whose rows each write their tokens into slots of their own.

transformers' static layers write the tokens of a pass behind those of the pass before, in the same
slots of all rows, and cannot take any back. Here a pass says for each row and token in which slot
it goes: the first free ones of the row. Accepted tokens stay where they are, and no mask shows the
slots of rejected ones, which are free again. Where a call ends, the tokens are put in order. The
last slot is spare: padding that has no room goes there. All layers read the slots from one object,
so that a pass needs no step of Python for each layer and compiles to one graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import StaticCache, StaticLayer

from .cache import Entries, Pass
from .compiled import CompiledForward
from .model_memo import memo_of

# Caches have multiples of it as lengths, so that a slightly longer prompt compiles nothing new.
_LENGTH_STEP = 128
_KEPT_LAYERS = "layers of a static cache"


class Slots:
    """Where the tokens of the next pass go, shared by all layers."""

    targets: torch.Tensor  # int64 (R, S), the slot of each token of the pass


class SlottedLayer(StaticLayer):
    """A layer that shares the tensors of a `StaticLayer`, which holds the prompt already, and
    writes where [`Slots`] says."""

    def __init__(self, layer: StaticLayer, slots: Slots) -> None:
        self.__dict__ |= layer.__dict__
        self.slots = slots

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        targets = self.slots.targets.to(self.keys.device)  # layers may be on several devices
        for entries, states in ((self.keys, key_states), (self.values, value_states)):
            if len(targets) == 1:
                entries.index_copy_(2, targets[0], states)
            else:
                entries.scatter_(2, targets[:, None, :, None].expand_as(states), states)
        return self.keys, self.values


def has_begun(cache: StaticCache) -> bool:
    """Whether anything has been written into a static cache."""
    return int(cache.get_seq_length()) > 0


class SlottedEntries(Entries):
    """The slots of a static cache; `forward` is what runs over it, in passes up to the `widest`.

    Attributes:
        length (`int`): The slots of a row.
        places (`np.ndarray`, int64 of shape `(R, length)`): The index of the token whose entries a
            slot holds, those of a given cache counted; -1 where it is free.
    """

    def __init__(self, cache: Any, forward: CompiledForward, widest: int, same_bits: bool) -> None:
        super().__init__(cache)
        self._forward, self._model, self._config = forward, forward.model, forward.config
        self._plain_layers = cache.layers
        if not has_begun(cache):
            # Also in place of layers that keep a window: a mask hides what is outside of it, and a
            # draft may be rejected behind it.
            config = self._config
            length = max(layer.max_cache_len for layer in cache.layers)
            if config.cache_implementation is not None:  # `generate` has made it
                if same_bits:  # depend on the length, which earlier calls must not change
                    length = getattr(config, "max_cache_len", None) or 0
                # It is for the whole text and a pass behind it.
                needed = max(length, config.max_length) + widest
                length = -(-needed // _LENGTH_STEP) * _LENGTH_STEP
            cache.layers = [StaticLayer(max_cache_len=length) for _ in cache.layers]
            for old, layer in zip(self._plain_layers, cache.layers, strict=True):
                if old.is_initialized:  # ahead of a prefill in chunks, which may be compiled
                    layer.lazy_initialization(old.keys, old.values)
        self.length: int = cache.layers[0].max_cache_len
        self.places = np.empty((0, self.length), dtype=np.int64)
        self.slots = Slots()
        self._layers = cache.layers

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

    def begin(self, prompt_length: int) -> None:
        if len(self._layers) != len(self._plain_layers):  # Dory copies some, windows or not
            raise ValueError("the model adds layers of its own to a static cache")
        prefilled = int(self.cache.get_seq_length())
        self.given = prefilled - prompt_length
        slots = np.arange(self.length)
        rows = len(self._layers[0].keys)
        self.places = np.tile(np.where(slots < prefilled, slots, -1), (rows, 1))
        self.cache.layers = [SlottedLayer(layer, self.slots) for layer in self._layers]

    def before(self, now: Pass) -> None:
        self._free(now.cached)

    def targets(self, width: int) -> np.ndarray:
        """The slots of the next `width` tokens of each row, int64 `(R, width)`."""
        self._targets = np.full((len(self.places), width), self.length - 1)
        for targets, places in zip(self._targets, self.places, strict=True):
            free = np.flatnonzero(places < 0)[:width]
            targets[: len(free)] = free
        return self._targets

    def keep(self, done: Pass, paths: Sequence[list[int] | None]) -> list[int]:
        for i, kept in enumerate(done.kept(paths)):
            first = done.cached[i] + self.given
            self.places[i, self._targets[i, kept]] = np.arange(first, first + len(kept))
        return done.cached_after(paths)

    def close(self, cached: list[int]) -> None:
        self.cache.layers = self._layers
        if not cached:
            return
        self._free(cached)
        length = max(cached) + self.given
        in_order = np.where(self.places < 0, self.length, self.places).argsort(axis=1)[:, :length]
        for layer in self._layers:
            layer.cumulative_length.fill_(length)
            if (in_order != np.arange(length)).any():
                index = torch.from_numpy(in_order).to(layer.keys.device)[:, None, :, None]
                for entries in (layer.keys, layer.values):
                    expanded = index.expand(-1, entries.shape[1], -1, entries.shape[3])
                    entries[:, :, :length] = entries.gather(2, expanded)
        # Plain decoding would have left shorter layers, or ones that keep a window.
        self.cache.layers = []
        for layer, plain in zip(self._layers, self._plain_layers, strict=True):
            shape = type(layer), layer.max_cache_len
            if layer is not plain and (type(plain), plain.max_cache_len) != shape:
                plain.update(layer.keys[:, :, :length], layer.values[:, :, :length])
                self.cache.layers.append(plain)
            else:
                self.cache.layers.append(layer)

    def _free(self, cached: Sequence[int]) -> None:
        """Frees the slots of all but the first `cached` tokens of each row."""
        self.places[self.places >= np.array(cached)[:, None] + self.given] = -1
