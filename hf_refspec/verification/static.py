"""Draft trees in a static cache, verified by passes of a few fixed widths that can be compiled.

A pass is padded to one of a few widths, so that nothing is compiled anew while a text grows; with
CUDA graphs each width is one graph. Every row writes behind its own last token:

    row 0   . . p p p x x x r d d d _ _ _ _         .  left padding   r  root, d  draft nodes
    row 1   p p p p p x r d _ _ _ _ _ _             p  prompt         _  padding of the pass

What was rejected stays where it is: no mask shows it, and the next pass writes over it. Nodes of
the accepted path that stand behind others move to their slots in the layers of the next pass, see
[`SlottedLayer`]. The last slot of the cache is spare: what has no room goes there.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, StaticCache

from ..drafting.tree import DraftTree
from ..text_config import text_config
from .cache import caches_images, find_cache, move_entries
from .facts import facts_about
from .positions import attention_windows, length_dependent_rope
from .static_cache import Slots, SlottedLayer, as_plain, has_begun, is_static, keep_all, keeps_all
from .tree import TreeVerifier, laid_out
from .verifier import CacheMark, TokenSequence

logger = logging.getLogger("hf_refspec")

# The tokens of a row in a pass. More of them fit drafts closer, and take longer to compile.
WIDTHS = (1, 8, 16, 32, 65)
# Entries of a row that a compiled pass can move; longer paths that do not stand in order are rare.
_MOST_MOVED = 16
# Lengths of caches are multiples of it: a prompt that is a little longer compiles nothing anew.
_LENGTH_STEP = 128
# Each width and number of rows is compiled by itself, without a graph for any; and torch gives a
# function up after 8 graphs, while all models have one in common. The first limit was called
# otherwise before torch 2.6.
_COMPILING = {
    "automatic_dynamic_shapes": False,
    "recompile_limit": 256,
    "cache_size_limit": 256,
    "accumulated_recompile_limit": 4096,
}
# With CUDA graphs torch runs, captures, and only then replays what it has compiled.
_CAPTURES = 2

_KEPT_LAYERS = "layers of a static cache"

_Moves: TypeAlias = "list[tuple[list[int], list[int]]]"


class StaticVerifier(TreeVerifier):
    """Draft trees of any number of rows in a static cache."""

    name = "static"
    drops_rows = False
    widths: tuple[int, ...] = WIDTHS

    def __init__(
        self,
        model: PreTrainedModel,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
    ) -> None:
        super().__init__(model, generation_config, model_kwargs)
        self._compiled = _compiles(model, generation_config, self.model_kwargs)
        self._plain_layers = self.cache.layers
        if not has_begun(self.cache):
            keep_all(self.cache, self._wanted_length())
        self._length: int = self.cache.layers[0].max_cache_len
        self._layers = self.cache.layers
        self._slots = Slots()
        # What the next pass moves: of each row, from these slots to those; and how much of it was
        # cached before.
        self._moves: _Moves = []
        self._cached_in_place: list[int] = []
        self._windows = attention_windows(text_config(model)) or {}
        self._run_before: set[int] = set()  # the widths of compiled passes
        self._prepares = False  # whether the last pass was compiled or captured, which takes longer

    @classmethod
    def supports(cls, model: PreTrainedModel, model_kwargs: dict[str, Any]) -> bool:
        """Needs position ids, a masked attention kernel, and a cache that keeps the whole text or
        has not begun."""
        cache, mask = find_cache(model_kwargs), model_kwargs.get("attention_mask")
        config = text_config(model)
        return (
            is_static(cache)
            and model_kwargs.get("position_ids") is not None
            and (mask is None or mask.ndim == 2)
            and getattr(model.config, "_attn_implementation", None) in ("sdpa", "eager")
            and not getattr(cache, "offloading", False)
            and (keeps_all(cache) or (not has_begun(cache) and _length_is_known(cache, config)))
            and attention_windows(config) is not None
            and not caches_images(config, model_kwargs)
            and not length_dependent_rope(config)
        )

    @property
    def most_nodes(self) -> int:
        """So many as the widest pass takes, and as have room behind the longest row."""
        room = self._length - 1 - max(self._ends)  # the last slot is spare
        return max(min(self.widths[-1], room) - 1, 0)

    @property
    def kind_of_pass(self) -> str:
        return f"{self.name}, {'compiled' if self._compiled else 'eager'}"

    @property
    def in_step(self) -> bool:
        return super().in_step and not self._prepares

    def select(self, rows: list[int]) -> None:
        raise NotImplementedError("other numbers of rows would be compiled anew")

    def mark(self) -> CacheMark:
        self._move()
        return CacheMark(self._marked(), 0, None)

    def roll_back(self, mark: CacheMark) -> None:
        """The entries behind the rows may stay, no mask shows them."""
        vars(self).update(mark.attributes)
        self._moves = []

    def finish(self, ids: torch.Tensor, own: Sequence[int]) -> None:
        if len(ids) > 1 and self._given + ids.shape[1] > self._length:
            # No slot is spare: rows that stood still have written into the last one. All run the
            # same number of tokens again, so that none is padded.
            last = self._length - 1 - self._given
            self.cached = [min(last, *self.cached)] * len(self.cached)
        super().finish(ids, own)

    def release(self) -> None:
        """Keeps the layers of compiled passes for the next call, if that has as many rows and a
        cache of the same length: a CUDA graph is bound to the memory that it was captured with."""
        if self._owns_cache:
            for layer in self._layers:
                for tensor in (layer.keys, layer.values, layer.cumulative_length):
                    tensor.zero_()
            key = self._key(len(self.cached))
            facts_about(self.model)[_KEPT_LAYERS] = key, self._layers

    def _prefill(self, rows: Sequence[TokenSequence]) -> torch.Tensor:
        if self._owns_cache:
            key, layers = facts_about(self.model).pop(_KEPT_LAYERS, (None, []))
            if key == self._key(len(rows)):
                self._layers = self.cache.layers = layers
        return super()._prefill(rows)

    def _key(self, rows: int) -> tuple[Any, ...]:
        """What the layers of a cache depend on."""
        return self._length, rows, self.model.dtype, self.model.device

    @property
    def _owns_cache(self) -> bool:
        """Whether `generate` has made the cache of a call that is compiled, and returns it to
        nobody."""
        config = self.generation_config
        made = config.cache_implementation is not None and not config.return_dict_in_generate
        return self._compiled and made

    @property
    def _ends(self) -> list[int]:
        """The slots behind the rows."""
        return [cached + self._given for cached in self.cached]

    def _wanted_length(self) -> int:
        """The length of a cache that has not begun: as it was given, or for the whole text and a
        pass behind it where `generate` has made it."""
        longest = max(layer.max_cache_len for layer in self.cache.layers)
        if self.generation_config.cache_implementation is None:
            return longest
        needed = max(longest, self.generation_config.max_length) + self.widths[-1]
        return rounded_up(needed)

    def _take_up(self, outputs: Mapping[str, Any]) -> None:
        super()._take_up(outputs)
        rows, prefilled = self._prompt_mask.shape
        seen = torch.ones((rows, self._length), dtype=torch.bool, device=self._prompt_mask.device)
        seen[:, :prefilled] = self._prompt_mask
        self._prompt_mask = seen
        self.cache.layers = [SlottedLayer(layer, self._slots) for layer in self._layers]

    def _run(self, rows: Sequence[TokenSequence], drafts: Sequence[DraftTree]) -> torch.Tensor:
        self._check_room()
        self.pass_tokens = width = self._width(self._size)
        compiled = self._compiled and width in self.widths
        if not compiled:
            self._move()
        tokens, places, visible = laid_out(rows, drafts, self.cached, self._pending, width)
        targets = np.array(self._ends)[:, None] + np.arange(width)
        numbers = [tokens, places, np.minimum(targets, self._length - 1)]
        moves = self._padded_moves() if compiled and self.takes_trees else []
        *on_device, visible_on_device = self._uploaded([*numbers, *moves], visible)
        token_ids, token_places, self._slots.targets, *moved = on_device
        self._slots.moved_from, self._slots.moved_to = moved or (None, None)
        masks = self._masks(token_places, visible_on_device)
        [mask, *_] = masks.values()
        model_inputs = self._model_inputs(token_ids, token_places, mask, kept=0)  # all
        if "" not in masks:  # one for each type of layer
            model_inputs["attention_mask"] = masks
        logits = self._logits_of(model_inputs, compiled)
        self._moves = []
        return self._from_roots(logits)

    def _check_room(self) -> None:
        """Refuses to write over a text that the caller's cache is too short for."""
        for pending, end in zip(self._pending, self._ends, strict=True):
            if pending and end >= self._length:
                raise ValueError(
                    f"`past_key_values` has room for {self._length} tokens, and a text has more. "
                    "Pass a `StaticCache` with a larger `max_cache_len`."
                )

    def _width(self, size: int) -> int:
        """The narrowest pass for so many tokens of a row. Where they reach the last slot, nothing
        may be padded; and rows that are brought to one length in the end may need a wider pass than
        there is."""
        if max(self._ends) + size >= self._length:
            return size
        return next((width for width in self.widths if width >= size), size)

    def _uploaded(self, numbers: Sequence[np.ndarray], visible: np.ndarray) -> list[torch.Tensor]:
        """Arrays of int64 and one of bool as tensors on the model's device, by one copy."""
        device = self._prompt_mask.device
        packed = np.concatenate([each.ravel().view(np.uint8) for each in (*numbers, visible)])
        on_host = torch.from_numpy(packed)
        if device.type == "cuda":
            on_host = on_host.pin_memory()
        *parts, last = on_host.to(device, non_blocking=True).split(
            [each.nbytes for each in (*numbers, visible)]
        )
        # Copies: each begins where memory is aligned, and no graph sees what it is a view of.
        longs = [
            part.view(torch.int64).view(each.shape).clone()
            for part, each in zip(parts, numbers, strict=True)
        ]
        return [*longs, last.view(torch.bool).view(visible.shape)]

    def _masks(self, places: torch.Tensor, visible: torch.Tensor) -> dict[str, torch.Tensor]:
        """What each token of the pass sees of the cache, by type of layer.

        Args:
            places (`torch.LongTensor` of shape `(R, S)`): Their indices in their rows.
            visible (`torch.BoolTensor` of shape `(R, S, S)`): Which of each other they see.

        Returns:
            `dict[str, torch.Tensor]`: Masks `(R, 1, S, length)` as attention takes them.
        """
        (rows, size), length = places.shape, self._length
        columns = torch.arange(length, device=places.device)
        targets = self._slots.targets
        past = (columns < targets[:, :1]) & self._prompt_mask  # (R, length)
        masks = {}
        for kind, window in self._windows.items():
            mask, among = past[:, None, None].expand(rows, 1, size, length), visible[:, None]
            if window is not None:
                distances = places[..., None] - (columns - self._given)
                mask = mask & (distances < window)[:, None]
                among = among & (places[..., None] - places[:, None] < window)[:, None]
            index = targets[:, None, None].expand(rows, 1, size, size)
            masks[kind] = self._as_attention_takes(mask.scatter(3, index, among))
        return masks

    def _logits_of(self, model_inputs: dict[str, Any], compiled: bool) -> torch.Tensor:
        """The logits of all tokens of a pass, `(R, S, vocab_size)`."""
        if not compiled:
            return self.model(**model_inputs, return_dict=True).logits
        from torch._dynamo.exc import TorchDynamoException  # takes long to import

        graphs = _graphs()
        forward = self.model.get_compiled_call(self.generation_config.compile_config)
        try:
            # Only the first pass of each width in a call may compile anything.
            with nullcontext() if self.pass_tokens in self._run_before else _compiling():
                logits = forward(**model_inputs, return_dict=True).logits
        except TorchDynamoException as error:
            self._compiled = False
            facts_about(self.model)[_not_compiled(self.generation_config)] = True
            logger.warning(
                "%s cannot be compiled, and runs as it is: %s",
                type(self.model).__name__,
                str(error).strip().partition("\n")[0],
            )
            self._move()
            self._slots.moved_from = self._slots.moved_to = None
            return self._logits_of(model_inputs, compiled=False)
        self._run_before.add(self.pass_tokens)
        self._prepares = self._is_preparing(_graphs() > graphs)
        # The next pass of a CUDA graph writes over what this one has returned.
        return logits.clone() if logits.device.type == "cuda" else logits

    def _is_preparing(self, compiled: bool) -> bool:
        """Whether a pass has done more than run: compiled, or captured as a CUDA graph."""
        left = facts_about(self.model).setdefault(
            ("captures left", self._key(len(self.cached))), {}
        )
        width = self.pass_tokens
        before = left.get(width, 0)
        left[width] = _CAPTURES if compiled else max(before - 1, 0)
        return compiled or (before > 0 and self.model.device.type == "cuda")

    def _keep(self, paths: Sequence[list[int] | None]) -> None:
        self._moves, self._cached_in_place = [], []
        for cached, end, p, path in zip(self.cached, self._ends, self._pending, paths, strict=True):
            kept = [] if path is None else [*range(p), *(p + node for node in path)]
            first = next((i for i, node in enumerate(kept) if i != node), len(kept))
            self._cached_in_place.append(cached + first)
            sources = [end + node for node in kept[first:]]
            self._moves.append((sources, list(range(end + first, end + len(kept)))))
        if not self._compiled or max(len(sources) for sources, _ in self._moves) > _MOST_MOVED:
            self._move()

    def _move(self) -> None:
        """Moves what the last pass has left to the next one."""
        if any(sources for sources, _ in self._moves):
            move_entries(self.cache, *self._padded_moves())
        self._moves = []

    def _padded_moves(self) -> list[np.ndarray]:
        """From where to where entries move, int64 `(R, n)`: what a row does not fill is the first
        slot, which stays where it is."""
        moves = self._moves or [([], [])] * len(self.cached)
        count = max(_MOST_MOVED, *(len(sources) for sources, _ in moves))
        padded = np.zeros((2, len(moves), count), dtype=np.int64)
        for row, sides in enumerate(moves):
            for side, slots in zip(padded, sides, strict=True):
                side[row, : len(slots)] = slots
        return list(padded)

    def _take_back(self) -> None:
        if any(sources for sources, _ in self._moves):  # some layers have moved them, some have not
            self.cached, self._moves = self._cached_in_place, []

    def _crop(self, width: int | None = None) -> None:
        """Nothing to cut: the next pass writes over what is not kept."""

    def _settle(self) -> None:
        self._move()
        self.cache.layers = self._layers
        if not self.cached:
            return
        length = max(self._ends)
        for layer in self._layers:
            layer.cumulative_length.fill_(length)
        self.cache.layers = [
            as_plain(*layers, length)
            for layers in zip(self._layers, self._plain_layers, strict=True)
        ]


def rounded_up(length: int) -> int:
    """To a length that caches have."""
    return -(-length // _LENGTH_STEP) * _LENGTH_STEP


def _length_is_known(cache: StaticCache, config: PreTrainedConfig) -> bool:
    """Whether a cache says how many tokens are to fit: not if somebody gave one whose layers all
    keep a window."""
    window = getattr(config, "sliding_window", None)
    windows = all(layer.is_sliding and layer.max_cache_len == window for layer in cache.layers)
    return not windows or not getattr(cache, "_is_user_defined", False)


def _graphs() -> int:
    """How many graphs torch has compiled."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def _compiling() -> AbstractContextManager[None]:
    """Around a pass that torch may compile."""
    config: Any = torch._dynamo.config
    options = {name: value for name, value in _COMPILING.items() if hasattr(config, name)}
    return config.patch(options)


def _compiles(
    model: PreTrainedModel, generation_config: GenerationConfig, model_kwargs: dict[str, Any]
) -> bool:
    """Whether `generate` would compile the passes of this call, and it has not failed before."""
    return _not_compiled(generation_config) not in facts_about(model) and bool(
        model._valid_auto_compile_criteria(model_kwargs, generation_config)
    )


def _not_compiled(generation_config: GenerationConfig) -> tuple[str, str]:
    """The fact that a model cannot be compiled so."""
    return "not compiled", repr(generation_config.compile_config)
