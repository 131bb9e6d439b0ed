"""Draft trees in a static cache, verified by passes of a few fixed widths that can be compiled.

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
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, StaticCache, StaticLayer, StaticSlidingWindowLayer

from ..text_config import text_config
from ..transformers_names import belongs_to_caller
from .cache import Entries, Pass, TokenSequence, find_cache
from .compiled import CompiledForward
from .masked_inputs import MaskedInputs, takes_masks
from .model_memo import memo_of
from .row_blocks import RowEntries
from .row_pass import RowPass, on_device, rows_of_pass, side_by_side
from .verifier import PassLogits, Verifier

# The tokens of a row in a pass. More of them fit drafts closer, and take longer to compile.
WIDTHS = (1, 8, 16, 32, 65)
# A pass of this width costs up to 1.3 plain steps in bfloat16 on a CPU (a GPU was not measured);
# wider ones take longer drafts, and every pass without a draft costs as much.
_REPRODUCIBLE_WIDTH = 16
# Caches have multiples of it as lengths, so that a slightly longer prompt compiles nothing new.
_LENGTH_STEP = 128
_KEPT_LAYERS = "layers of a static cache"


class StaticVerifier(Verifier):
    """Draft trees of any number of rows in a static cache."""

    name = "static"
    takes_trees = True
    drops_rows = False
    widths: tuple[int, ...] = WIDTHS

    entries: SlottedEntries

    @classmethod
    def supports(cls, model: PreTrainedModel, model_kwargs: dict[str, Any]) -> bool:
        """Needs a cache that keeps the whole text or has not begun, see also [`takes_masks`]."""
        cache = find_cache(model_kwargs)
        if not isinstance(cache, StaticCache) or not takes_masks(model, model_kwargs):
            return False
        kinds = {type(layer) for layer in cache.layers}
        if has_begun(cache) or not kinds <= {StaticLayer, StaticSlidingWindowLayer}:
            return kinds == {StaticLayer}
        # A given cache whose layers all keep a window does not say how many tokens are to fit.
        window = getattr(text_config(model), "sliding_window", None)
        return not belongs_to_caller(cache) or not all(
            layer.is_sliding and layer.max_cache_len == window for layer in cache.layers
        )

    def _entries(self, cache: Any) -> SlottedEntries:
        self._compiled = CompiledForward(self.model, self.generation_config, self.model_kwargs)
        return SlottedEntries(cache, self._compiled, self.widths[-1], self.same_bits)

    @property
    def most_nodes(self) -> int:
        """Limited by the widest pass and by the room behind the longest row."""
        room = self.entries.length - 1 - self._end  # the last slot is spare
        return max(min(self.widths[-1], room) - 1, 0)

    @property
    def kind_of_pass(self) -> str:
        return f"{self.name}, {'compiled' if self._compiled.is_active else 'eager'}"

    def finish(self, ids: torch.Tensor, own: Sequence[int]) -> None:
        if len(ids) > 1 and self.entries.given + ids.shape[1] > self.entries.length:
            # No slot is spare: rows that stood still have written into the last one. All run the
            # same number of tokens again, so that none is padded.
            last = self.entries.length - 1 - self.entries.given
            self.cached = [min(last, *self.cached)] * len(self.cached)
        super().finish(ids, own)

    def release(self) -> None:
        self.entries.release(len(self.cached))

    @property
    def _end(self) -> int:
        """How many slots the longest row takes."""
        return max(self.cached) + self.entries.given

    def _prefill(self, rows: Sequence[TokenSequence]) -> PassLogits:
        self.entries.reuse(len(rows))
        return super()._prefill(rows)

    def _after_prefill(self, outputs: Mapping[str, Any]) -> None:
        shape = len(self.cached), self._prompt_length
        self._inputs = MaskedInputs(self.model, self.model_kwargs, self.cache, *shape)
        self._is_text = np.ones((shape[0], self.entries.length), dtype=np.bool_)
        if (mask := self.model_kwargs.get("attention_mask")) is not None:
            prefilled = mask[:, : int(self.cache.get_seq_length())].numpy(force=True)
            self._is_text[:, : prefilled.shape[1]] = prefilled != 0

    def _run(self, now: Pass) -> PassLogits:
        entries = self.entries
        ends = [cached + entries.given for cached in now.cached]
        if any(p and end >= entries.length for p, end in zip(now.pending, ends, strict=True)):
            raise ValueError(
                f"The static cache has room for {entries.length} tokens, and a text has more. Pass "
                "a `StaticCache` with a larger `max_cache_len`."
            )
        width = self._width(now.size)
        self.pass_tokens = width * len(now.rows)
        rows = rows_of_pass(now, [RowEntries(0, end) for end in ends])
        tokens, places = side_by_side(now, rows, width)
        targets = entries.targets(width)
        entries.slots.targets = on_device(targets, self._inputs.device)
        mask = self._inputs.masks(partial(self._seen, rows, places + entries.given, targets))
        model_inputs = self._inputs.of_pass(tokens, places, mask, kept=0)  # all
        logits = None
        if self._compiled.is_active and width in self.widths:
            logits = self._compiled(model_inputs, width, entries.shape(len(rows)))
            self.in_step = self.in_step and not self._compiled.prepared
        if logits is None:
            logits = self.model(**model_inputs, return_dict=True).logits
        skipped = max(min(now.pending) - 1, 0)
        logits = logits[:, skipped : now.size]
        roots = [i * logits.shape[1] + p - 1 - skipped for i, p in enumerate(now.pending)]
        return logits.flatten(0, 1), roots

    def _seen(
        self, rows: Sequence[RowPass], places: np.ndarray, targets: np.ndarray, window: int | None
    ) -> np.ndarray:
        """Which slots each token sees, bool `(R, S, length)`: those of the text and, among the
        `targets` of the pass `(R, S)`, what is visible to it; of both none that is outside of the
        window. Padding sees the text and itself."""
        held, width = self.entries.places, places.shape[1]
        seen = np.repeat(((held >= 0) & self._is_text)[:, None], width, axis=1)
        if window is not None:
            seen &= places[:, :, None] - held[:, None] < window
        for own, row, at, slots in zip(seen, rows, places, targets, strict=True):
            visible = np.eye(width, dtype=np.bool_)
            visible[: row.size, : row.size] = row.visible
            if window is not None:
                visible &= at[:, None] - at < window
            own[:, slots] = visible
        return seen

    def _width(self, size: int) -> int:
        """The narrowest width for `size` tokens of a row: `size` itself where they reach the last
        slot, so that nothing is padded, and where rows that are brought to one length in the end
        need more than the widest."""
        if self._end + size >= self.entries.length:
            return size
        return next((width for width in self.widths if width >= size), size)


class ReproducibleVerifier(StaticVerifier):
    """Chains of any number of rows in passes of one width: the same bits with drafts and without.

    In bfloat16 a pass over several tokens rounds otherwise than one over a single token, so that
    drafts may change a near-tie. Not so if all passes have one shape, and attention sums in one
    order: rows of a matrix product of one shape do not depend on each other, and masked entries add
    exact zeros. Attention sums over slots, so that drafts are chains: in a chain each token stands
    in the slot that it keeps, in a tree it may not.

    Where tokens choose among experts, what others choose changes the shapes, except with
    transformers' `experts_implementation="batched_mm"`. The probe compares the bits.
    """

    name = "reproducible"
    takes_trees = False
    same_bits = True
    widths = (_REPRODUCIBLE_WIDTH,)


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
