"""The slots of a static cache: every row writes behind its own last token, padding included.

A pass is padded to one of a few widths, so that a growing text compiles nothing new; with
CUDA graphs each width is one graph. Every row writes behind its own last token:

    row 0   . . p p p x x x r d d d _ _ _ _         .  left padding   r  root, d  draft nodes
    row 1   p p p p p x r d _ _ _ _ _ _             p  prompt         _  padding of the pass

transformers' static layers write the tokens of a pass behind those of the pass before, in the same
slots of all rows, and cannot take any back. Here a pass says for each row and token in which slot
it goes: the first free ones of the row. Accepted tokens stay where they are, and no mask shows the
slots of rejected ones, which are free again. Where a call ends, the tokens are put in order. The
last slot is spare: padding that has no room goes there. All layers read the slots from one object,
so that a pass needs no step of Python for each layer and compiles to one graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedModel, StaticCache, StaticLayer

from .caches import find_cache
from .compiled import CompiledForward
from .entries import Entries
from .model_memo import memo_of
from .passes import Pass

# The tokens of a row in a pass. More of them fit drafts closer, and take longer to compile.
WIDTHS = (1, 8, 16, 32, 65)
# Caches have multiples of it as lengths, so that a slightly longer prompt compiles nothing new.
_LENGTH_STEP = 128
_KEPT_LAYERS = "layers of a static cache"


class NoRoomError(ValueError):
    """A text is longer than the static cache that the caller gave; plain decoding fails as well."""


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


class SlottedEntries(Entries):
    """The slots of a static cache, for passes of these `widths`.

    Attributes:
        length (`int`): The slots of a row.
        places (`np.ndarray`, int64 of shape `(R, length)`): The index of the token whose entries a
            slot holds, those of a given cache counted; -1 where it is free.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        widths: tuple[int, ...],
        same_bits: bool = False,
    ) -> None:
        cache: Any = find_cache(model_kwargs)
        super().__init__(cache)
        self._model = model
        self._config = generation_config
        self._widths = widths
        self._compiled = CompiledForward(model, generation_config, model_kwargs)
        self._plain_layers = cache.layers
        if not has_begun(cache):
            # Also in place of layers that keep a window: a mask hides what is outside of it, and a
            # draft may be rejected behind it.
            length = max(layer.max_cache_len for layer in cache.layers)
            if generation_config.cache_implementation is not None:  # `generate` has made it
                if same_bits:  # depend on the length, which earlier calls must not change
                    length = getattr(generation_config, "max_cache_len", None) or 0
                # Room for the whole text and a pass behind it.
                needed = max(length, generation_config.max_length) + widths[-1]
                length = -(-needed // _LENGTH_STEP) * _LENGTH_STEP
            cache.layers = [StaticLayer(max_cache_len=length) for _ in cache.layers]
            for old, layer in zip(self._plain_layers, cache.layers, strict=True):
                if old.is_initialized:  # ahead of a prefill in chunks, which may be compiled
                    layer.lazy_initialization(old.keys, old.values)
        self.length: int = cache.layers[0].max_cache_len
        self.places = np.empty((0, self.length), dtype=np.int64)
        self.slots = Slots()
        self._layers = cache.layers

    @property
    def variant(self) -> str:
        return "compiled" if self._compiled.is_active else "eager"

    def before_prefill(self, count: int) -> None:
        """Takes the layers that an earlier call has released, if they fit: a CUDA graph is bound to
        the memory that it was captured with."""
        if self._is_owned:
            shape, layers = memo_of(self._model).pop(_KEPT_LAYERS, (None, []))
            if shape == self._shape(count):
                self._layers = self.cache.layers = layers

    def begin(
        self, prompt_length: int, model_kwargs: Mapping[str, Any], prompts: list[int]
    ) -> None:
        if len(self._layers) != len(self._plain_layers):  # Dory copies some, windows or not
            raise ValueError("the model adds layers of its own to a static cache")
        prefilled = int(self.cache.get_seq_length())
        self.prior_length = prefilled - prompt_length
        slots = np.arange(self.length)
        rows = len(self._layers[0].keys)
        self.places = np.tile(np.where(slots < prefilled, slots, -1), (rows, 1))
        self._is_text = np.ones((rows, self.length), dtype=np.bool_)
        if (mask := model_kwargs.get("attention_mask")) is not None:
            is_text = mask[:, :prefilled].numpy(force=True) != 0
            self._is_text[:, : is_text.shape[1]] = is_text
        self.cache.layers = [SlottedLayer(layer, self.slots) for layer in self._layers]

    def before(self, now: Pass) -> None:
        self._free(now.cached)

    def room(self, cached: Sequence[int]) -> int:
        """Limited by the widest pass and by the slots behind the longest row; the last is spare."""
        behind = self.length - 1 - max(cached) - self.prior_length
        return max(min(self._widths[-1], behind) - 1, 0)

    def width_of_pass(self, now: Pass) -> int:
        """The narrowest width for the tokens of each row: their number itself where they reach the
        last slot, so that nothing is padded, and where rows that are brought to one length in the
        end need more than the widest.

        Raises:
            NoRoomError: If the cache has no room for them.
        """
        ends = [cached + self.prior_length for cached in now.cached]
        if any(p and end >= self.length for p, end in zip(now.pending, ends, strict=True)):
            raise NoRoomError(
                f"The static cache has room for {self.length} tokens, and a text has more. Pass "
                "a `StaticCache` with a larger `max_cache_len`."
            )
        if max(ends) + now.size >= self.length:
            return now.size
        return next((width for width in self._widths if width >= now.size), now.size)

    def targets(self, width: int) -> np.ndarray:
        """The slots of the next `width` tokens of each row, int64 `(R, width)`."""
        self._targets = np.full((len(self.places), width), self.length - 1)
        for targets, places in zip(self._targets, self.places, strict=True):
            free = np.flatnonzero(places < 0)[:width]
            targets[: len(free)] = free
        return self._targets

    def seen(
        self, now: Pass, indices: np.ndarray, targets: np.ndarray, window: int | None
    ) -> np.ndarray:
        """Which slots each token sees, bool `(R, S, length)`: those of the text and, among the
        `targets` of the pass `(R, S)`, what the draft's mask allows; of both nothing that is
        outside of the window. `indices` `(R, S)` are those of the tokens, the entries before the
        prompt counted. Padding sees the text and itself."""
        width = indices.shape[1]
        seen = np.repeat(((self.places >= 0) & self._is_text)[:, None], width, axis=1)
        if window is not None:
            seen &= indices[:, :, None] - self.places[:, None] < window
        for i, mask in enumerate(seen):
            size = now.sizes[i]
            visible = np.eye(width, dtype=np.bool_)
            visible[:size, :size] = now.visible[i]
            if window is not None:
                visible &= indices[i][:, None] - indices[i] < window
            mask[:, targets[i]] = visible
        return seen

    def run(self, model_inputs: dict[str, Any], width: int) -> tuple[torch.Tensor, bool]:
        """The logits of all tokens of a pass, `(R, S, vocab_size)`, compiled where `generate` would
        compile it; and whether it was compiled or captured just now, which takes longer."""
        if self._compiled.is_active and width in self._widths:
            shape = self._shape(len(self.places))
            logits = self._compiled(model_inputs, width, shape)
            if logits is not None:
                return logits, self._compiled.prepared
        return self._model(**model_inputs, return_dict=True).logits, False

    def keep(self, done: Pass, paths: Sequence[list[int] | None]) -> list[int]:
        for i, kept in enumerate(done.kept(paths)):
            first = done.cached[i] + self.prior_length
            self.places[i, self._targets[i, kept]] = np.arange(first, first + len(kept))
        return done.cached_after(paths)

    def lengths_to_finish(self, cached: list[int], length: int) -> list[int]:
        """How much of each row is kept before the last pass brings all rows to this length."""
        if len(cached) > 1 and self.prior_length + length + 1 > self.length:
            # No slot is spare: rows that stood still have written into the last one. All run the
            # same number of tokens again, so that none is padded.
            last = self.length - 1 - self.prior_length
            return [min(last, *cached)] * len(cached)
        return cached

    def close(self, cached: list[int]) -> None:
        self.cache.layers = self._layers
        if not cached:
            return
        self._free(cached)
        length = max(cached) + self.prior_length
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
        self.places[self.places >= np.array(cached)[:, None] + self.prior_length] = -1

    def release(self) -> None:
        """Keeps the layers of compiled passes for the next call."""
        if self._is_owned:
            for layer in self._layers:
                for tensor in (layer.keys, layer.values, layer.cumulative_length):
                    tensor.zero_()
            memo_of(self._model)[_KEPT_LAYERS] = self._shape(len(self.places)), self._layers

    def _shape(self, rows: int) -> tuple[Any, ...]:
        """The properties that the layers of a cache depend on."""
        return self.length, rows, self._model.dtype, self._model.device

    @property
    def _is_owned(self) -> bool:
        """Whether `generate` made the cache of this compiled call and does not return it."""
        config = self._config
        is_made = config.cache_implementation is not None and not config.return_dict_in_generate
        return self._compiled.is_active and is_made


def has_begun(cache: StaticCache) -> bool:
    """Whether anything has been written into a static cache."""
    return int(cache.get_seq_length()) > 0
