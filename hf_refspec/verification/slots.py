"""Passes over a static cache.

A pass is padded to one of a few widths, so that a growing text compiles nothing new; with
CUDA graphs each width is one graph. Every row writes after its own last token:

    row 0   . . p p p x x x r d d d _ _ _ _         .  left padding   r  root, d  draft nodes
    row 1   p p p p p x r d _ _ _ _ _ _             p  prompt         _  padding of the pass

transformers' static layers write the tokens of a pass after the previous pass, in the same slots of
all rows, and cannot take any back. Here a pass says for each row and token in which slot
it goes: the first free ones of the row. Accepted tokens stay where they are, and no mask shows the
slots of rejected ones, which are free again. Where a call ends, the tokens are put in order. The
last slot is spare: padding that has no room goes there. All layers read the slots from one object,
so that a pass needs no step of Python for each layer and compiles to one graph.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedModel, StaticLayer

from ..transformers_names import compiles_passes
from .entries import Entries
from .model_memo import memo_of
from .passes import MaskedInputs, Pass, PassResult, Prefill, uploaded

logger = logging.getLogger("hf_refspec")

# The tokens of a row in a pass. More widths fit drafts closer, and take longer to compile.
WIDTHS = (1, 8, 16, 32, 65)
# Caches have multiples of it as lengths, so that a slightly longer prompt compiles nothing new.
_LENGTH_STEP = 128
_KEPT_LAYERS = "layers of a static cache"
# Each width and number of rows is compiled by itself, without a graph for any. torch gives up on a
# function after 8 graphs, which all models share; that limit had another name before torch 2.6.
_COMPILING = {
    "automatic_dynamic_shapes": False,
    "recompile_limit": 256,
    "cache_size_limit": 256,
    "accumulated_recompile_limit": 4096,
}
# With CUDA graphs torch runs, captures, and only then replays what it has compiled.
_CAPTURES = 2


class Targets:
    """The slots of the next pass, shared by all layers."""

    slots: torch.Tensor  # int64 (R, S), the slot of each token of the pass

    def aim(self, slots: torch.Tensor) -> None:
        self.slots = slots


class SlottedLayer(StaticLayer):
    """A layer that shares a `StaticLayer`'s tensors, and writes where [`Targets`] says."""

    def __init__(self, layer: StaticLayer, targets: Targets) -> None:
        self.__dict__ |= layer.__dict__
        self.targets = targets

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        slots = self.targets.slots.to(self.keys.device)  # layers may be on several devices
        for tensor, states in ((self.keys, key_states), (self.values, value_states)):
            if len(slots) == 1:
                tensor.index_copy_(2, slots[0], states)
            else:
                tensor.scatter_(2, slots[:, None, :, None].expand_as(states), states)
        return self.keys, self.values


def fixed_width_pass(
    _model: PreTrainedModel, pass_: Pass, entries: SlottedEntries, inputs: MaskedInputs
) -> PassResult:
    """Rows side by side, padded to one of a few widths that can be compiled."""
    width = entries.width_of_pass(pass_)
    slots = entries.next_slots(width)
    tokens, indices = pass_.aligned(width)
    arrays: dict[Any, np.ndarray] = {
        "tokens": tokens,
        "positions": inputs.positions(indices),
        "slots": slots,
    }
    for window in inputs.windows:
        arrays[window] = entries.mask(pass_, indices + entries.prior_length, slots, window)
    tensors = uploaded(arrays, inputs.device)
    entries.targets.aim(tensors["slots"])
    mask = inputs.as_models_take(tensors)
    model_inputs = inputs.of_pass(tensors["tokens"], tensors["positions"], mask, kept=0)  # all
    logits, was_prepared = entries.forward(model_inputs, width, entries.shape)
    logits = logits[:, pass_.skipped : pass_.size]
    return PassResult(
        logits=logits.flatten(0, 1),
        roots=pass_.roots(logits.shape[1]),
        pass_tokens=width * len(pass_.rows),
        is_step=pass_.is_step and not was_prepared,
    )


class CompiledForward:
    """The forward pass of a model, compiled where `generate` would compile it, in passes of these
    `widths`."""

    def __init__(
        self,
        model: PreTrainedModel,
        generation_config: GenerationConfig,
        model_kwargs: Mapping[str, Any],
        widths: Sequence[int],
    ) -> None:
        self._model = model
        self._config = generation_config
        self._widths = widths
        self._failed = "not compiled", repr(generation_config.compile_config)
        self._run_before: set[int] = set()  # widths
        # True if passes are compiled: not after that has failed once.
        self.is_active = self._failed not in memo_of(model) and compiles_passes(
            model, dict(model_kwargs), generation_config
        )

    def __call__(
        self, model_inputs: dict[str, Any], width: int, shape: tuple[Any, ...]
    ) -> tuple[torch.Tensor, bool]:
        """The logits of all tokens of a pass, `(R, S, vocab_size)`, and whether it was compiled or
        captured just now, which takes longer. `shape` is `SlottedEntries.shape`."""
        if not self.is_active or width not in self._widths:
            return self._model(**model_inputs, return_dict=True).logits, False
        from torch._dynamo.exc import TorchDynamoException  # takes long to import

        dynamo: Any = torch._dynamo.config
        options = {name: value for name, value in _COMPILING.items() if hasattr(dynamo, name)}
        graphs = _graphs()
        forward = self._model.get_compiled_call(self._config.compile_config)
        try:
            # Only the first pass of each width in a call may compile anything.
            with nullcontext() if width in self._run_before else dynamo.patch(options):
                logits: torch.Tensor = forward(**model_inputs, return_dict=True).logits
        except TorchDynamoException as error:
            self.is_active = False
            memo_of(self._model)[self._failed] = True
            logger.warning(
                "%s cannot be compiled, and runs as it is: %s",
                type(self._model).__name__,
                str(error).strip().partition("\n")[0],
            )
            return self(model_inputs, width, shape)  # as it is: nothing has run
        self._run_before.add(width)
        compiled = _graphs() > graphs
        on_gpu = logits.device.type == "cuda"
        left = memo_of(self._model).setdefault(("captures left", shape), {})
        before = left.get(width, 0)
        left[width] = _CAPTURES if compiled else max(before - 1, 0)
        # The next pass of a CUDA graph writes over what this one has returned.
        return logits.clone() if on_gpu else logits, compiled or (before > 0 and on_gpu)


def _graphs() -> int:
    """The number of graphs that torch has compiled."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


class SlottedEntries(Entries):
    """The slots of a static cache, for passes of these `widths`.

    Attributes:
        slots_per_row (`int`): The slots of a row.
        places (`np.ndarray`, int64 of shape `(R, slots_per_row)`): The index of the token whose
            keys and values a slot holds, counted from the start of a given cache; -1 where it is
            free.
        targets ([`Targets`]): The slots of the next pass.
        forward ([`CompiledForward`]): Runs it.
        shape (`tuple`): The properties that the layers of the cache depend on.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        generation_config: GenerationConfig,
        model_kwargs: Mapping[str, Any],
        widths: Sequence[int],
    ) -> None:
        super().__init__(model, generation_config, model_kwargs)
        cache = self.cache
        self._model = model
        self._config = generation_config
        self._widths = widths
        self.forward = CompiledForward(model, generation_config, model_kwargs, widths)
        self.variant = "compiled" if self.forward.is_active else "eager"
        self._plain_layers = cache.layers
        if int(cache.get_seq_length()) == 0:
            # Also instead of layers that keep a window: a mask hides tokens outside of it, and a
            # draft may be rejected after it.
            slots = max(layer.max_cache_len for layer in cache.layers)
            if generation_config.cache_implementation is not None:  # `generate` has made it
                # Bits depend on the number of slots, which earlier calls must not change then.
                if len(widths) == 1:
                    slots = getattr(generation_config, "max_cache_len", None) or 0
                # Room for the whole text and a pass after it.
                needed = max(slots, generation_config.max_length) + widths[-1]
                slots = -(-needed // _LENGTH_STEP) * _LENGTH_STEP
            cache.layers = [StaticLayer(max_cache_len=slots) for _ in cache.layers]
            for old, layer in zip(self._plain_layers, cache.layers, strict=True):
                if old.is_initialized:  # ahead of a prefill in chunks, which may be compiled
                    layer.lazy_initialization(old.keys, old.values)
        self.slots_per_row: int = cache.layers[0].max_cache_len
        self.places = np.empty((0, self.slots_per_row), dtype=np.int64)
        self.shape: tuple[Any, ...] = ()  # known with the rows of the prefill
        self.targets = Targets()
        self._layers = cache.layers

    def before_prefill(self, count: int) -> None:
        """Takes an earlier call's layers, if they fit: a CUDA graph is bound to its memory."""
        self.shape = self.slots_per_row, count, self._model.dtype, self._model.device
        if self._is_owned:
            shape, layers = memo_of(self._model).pop(_KEPT_LAYERS, (None, []))
            if shape == self.shape:
                self._layers = self.cache.layers = layers

    def begin(self, prefill: Prefill) -> None:
        if len(self._layers) != len(self._plain_layers):  # Dory copies some, windows or not
            raise ValueError("the model adds layers of its own to a static cache")
        prefilled = int(self.cache.get_seq_length())
        self.prior_length = prefilled - prefill.prompt_length
        slots = np.arange(self.slots_per_row)
        rows = len(self._layers[0].keys)
        self.places = np.tile(np.where(slots < prefilled, slots, -1), (rows, 1))
        self._is_text = np.ones(self.places.shape, dtype=np.bool_)
        if (mask := prefill.model_kwargs.get("attention_mask")) is not None:
            is_text = (mask[:, :prefilled] != 0).numpy(force=True)
            self._is_text[:, : is_text.shape[1]] = is_text
        self.cache.layers = [SlottedLayer(layer, self.targets) for layer in self._layers]

    def before(self, pass_: Pass) -> None:
        self._free(pass_.cached)

    def room(self, cached: Sequence[int]) -> int:
        """Limited by the widest pass and by the slots after the longest row; the last is spare."""
        free = self.slots_per_row - 1 - max(cached) - self.prior_length
        return max(min(self._widths[-1], free) - 1, 0)

    def width_of_pass(self, pass_: Pass) -> int:
        """The narrowest width for the tokens of each row: their number itself where they reach the
        last slot, so that nothing is padded, and where rows that are brought to one length in the
        end need more than the widest.

        Raises:
            ValueError: If the cache, which the caller gave, has no room for them; plain decoding
                fails as well.
        """
        ends = [cached + self.prior_length for cached in pass_.cached]
        if any(p and end >= self.slots_per_row for p, end in zip(pass_.pending, ends, strict=True)):
            raise ValueError(
                f"The static cache has room for {self.slots_per_row} tokens, and a text has more. "
                "Pass a `StaticCache` with a larger `max_cache_len`."
            )
        if max(ends) + pass_.size >= self.slots_per_row:
            return pass_.size
        return next((width for width in self._widths if width >= pass_.size), pass_.size)

    def next_slots(self, width: int) -> np.ndarray:
        """The slots of the next `width` tokens of each row, int64 `(R, width)`."""
        self._written = np.full((len(self.places), width), self.slots_per_row - 1)
        for slots, places in zip(self._written, self.places, strict=True):
            free = np.flatnonzero(places < 0)[:width]
            slots[: len(free)] = free
        return self._written

    def mask(
        self, pass_: Pass, indices: np.ndarray, slots: np.ndarray, window: int | None
    ) -> np.ndarray:
        """The mask of the tokens, bool `(R, S, slots_per_row)`: each sees the slots of the text
        and, among the `slots` of the pass `(R, S)`, what the draft's mask allows, nothing outside
        of the window. The tokens' `indices` `(R, S)` count from the start of a given cache. Padding
        sees the text and itself."""
        width = indices.shape[1]
        mask = np.repeat(((self.places >= 0) & self._is_text)[:, None], width, axis=1)
        if window is not None:
            mask &= indices[:, :, None] - self.places[:, None] < window
        for i, row_mask in enumerate(mask):
            size = pass_.sizes[i]
            of_pass = np.eye(width, dtype=np.bool_)
            of_pass[:size, :size] = pass_.masks[i]
            if window is not None:
                of_pass &= indices[i][:, None] - indices[i] < window
            row_mask[:, slots[i]] = of_pass
        return mask

    def keep(self, pass_: Pass, paths: Sequence[list[int] | None]) -> list[int]:
        for i, kept in enumerate(pass_.kept(paths)):
            first = pass_.cached[i] + self.prior_length
            self.places[i, self._written[i, kept]] = np.arange(first, first + len(kept))
        return pass_.cached_after(paths)

    def lengths_to_finish(self, cached: list[int], length: int) -> list[int]:
        """The length of each row that is kept until the last pass brings all to this length."""
        if len(cached) > 1 and self.prior_length + length + 1 > self.slots_per_row:
            # No slot is spare: rows that stood still have written into the last one. All run the
            # same number of tokens again, so that none is padded.
            last = self.slots_per_row - 1 - self.prior_length
            return [min(last, *cached)] * len(cached)
        return cached

    def close(self, cached: list[int]) -> None:
        self.cache.layers = self._layers
        if not cached:
            return
        self._free(cached)
        length = max(cached) + self.prior_length
        in_order = np.where(self.places < 0, self.slots_per_row, self.places).argsort(axis=1)[
            :, :length
        ]
        for layer in self._layers:
            layer.cumulative_length.fill_(length)
            if (in_order != np.arange(length)).any():
                index = torch.from_numpy(in_order).to(layer.keys.device)[:, None, :, None]
                for tensor in (layer.keys, layer.values):
                    expanded = index.expand(-1, tensor.shape[1], -1, tensor.shape[3])
                    tensor[:, :, :length] = tensor.gather(2, expanded)
        # Plain decoding would have left shorter layers, or ones that keep a window.
        self.cache.layers = []
        for layer, plain in zip(self._layers, self._plain_layers, strict=True):
            kind = type(layer), layer.max_cache_len
            if layer is not plain and (type(plain), plain.max_cache_len) != kind:
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
            memo_of(self._model)[_KEPT_LAYERS] = self.shape, self._layers

    @property
    def _is_owned(self) -> bool:
        """True if `generate` made the cache of this compiled call and does not return it."""
        config = self._config
        is_made = config.cache_implementation is not None and not config.return_dict_in_generate
        return self.forward.is_active and is_made
