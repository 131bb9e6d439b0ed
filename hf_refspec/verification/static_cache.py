"""A static cache whose rows each write their tokens into slots of their own.

transformers' static layers write the tokens of a pass behind those of the pass before, in the same
slots of all rows, and cannot take any back. Here a pass says for each row and token in which slot
it goes: what was rejected is written over, rows of different lengths stand side by side, and the
accepted path of the pass before moves to where it belongs on the way. All layers read the slots
from one object, so that a pass needs no step of Python for each layer and compiles to one graph.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel, StaticCache
from transformers.cache_utils import Cache, StaticLayer, StaticSlidingWindowLayer

from ..text_config import text_config


class Slots:
    """Where the tokens of the next pass go, shared by all layers.

    Attributes:
        targets (`torch.LongTensor` of shape `(R, S)`): The slot of each token of the pass.
        moved_from, moved_to (`torch.LongTensor` of shape `(R, n)`): Entries that move before that;
            `None` where none ever do.
    """

    targets: torch.Tensor
    moved_from: torch.Tensor | None = None
    moved_to: torch.Tensor | None = None


class SlottedLayer(StaticLayer):
    """A layer that shares the tensors of a [`StaticLayer`] and writes where [`Slots`] says.

    Args:
        layer (`StaticLayer`): Holds the prompt already.
        slots ([`Slots`]): Of all layers.
    """

    def __init__(self, layer: StaticLayer, slots: Slots) -> None:
        self.__dict__ |= layer.__dict__
        self.slots = slots

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        slots, device = self.slots, self.keys.device  # layers may be on several devices
        targets = slots.targets.to(device)
        if slots.moved_from is not None and slots.moved_to is not None:
            moved_from, moved_to = slots.moved_from.to(device), slots.moved_to.to(device)
            _write(self.keys, moved_to, _read(self.keys, moved_from))
            _write(self.values, moved_to, _read(self.values, moved_from))
        _write(self.keys, targets, key_states)
        _write(self.values, targets, value_states)
        return self.keys, self.values


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


def is_static(cache: Cache | None) -> bool:
    """Whether all layers are static."""
    return (
        isinstance(cache, StaticCache)
        and bool(cache.layers)
        and all(type(layer) in (StaticLayer, StaticSlidingWindowLayer) for layer in cache.layers)
    )


def has_static_layers(cache: Cache) -> bool:
    """Whether some layer has a fixed length, so that nothing can be cropped from its end."""
    return any(isinstance(layer, StaticLayer) for layer in cache.layers)


def has_begun(cache: StaticCache) -> bool:
    """Whether anything has been written into a static cache."""
    return int(cache.get_seq_length()) > 0


def keeps_all(cache: StaticCache) -> bool:
    """Whether no layer keeps a window of the text alone."""
    return all(type(layer) is StaticLayer for layer in cache.layers)


def keep_all(cache: StaticCache, length: int | None) -> None:
    """Gives an unused static cache layers of this length, also in place of ones that keep a window:
    a mask hides what is outside of it, and a draft may be rejected behind it. By default they are
    as long as the longest layer."""
    if length is None:
        length = max(layer.max_cache_len for layer in cache.layers)
    before, cache.layers = cache.layers, [StaticLayer(max_cache_len=length) for _ in cache.layers]
    for old, layer in zip(before, cache.layers, strict=True):
        if old.is_initialized:  # ahead of a prefill in chunks, which may be compiled
            layer.lazy_initialization(old.keys, old.values)


def as_plain(layer: StaticLayer, empty: StaticLayer, length: int) -> StaticLayer:
    """The layer that plain decoding would have left.

    Args:
        layer (`StaticLayer`): As [`keep_all`] made it.
        empty (`StaticLayer`): The layer in whose place it is; it may be shorter, or keep a window.
        length (`int`): Of the text.
    """
    same_length = empty.max_cache_len == layer.max_cache_len
    if layer is empty or (type(empty) is StaticLayer and same_length):
        return layer
    empty.update(layer.keys[:, :, :length], layer.values[:, :, :length])
    return empty


def new_static_cache(model: PreTrainedModel, length: int) -> StaticCache:
    """An empty static cache of this length."""
    return StaticCache(config=text_config(model), max_cache_len=length)
