"""The arguments of forward passes whose mask and positions are given explicitly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from ..text_config import attention_windows, length_dependent_rope, text_config
from ..transformers_names import (
    CACHE_NAMES,
    attention_implementation,
    cache_name,
    has_compiled_call,
)
from .cache import caches_images
from .row_pass import on_device

_TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")


class MaskedInputs:
    """The arguments of forward passes after a prefill with these keyword arguments, over R prompts
    of this length (padding included), whose mask is given explicitly."""

    def __init__(
        self,
        model: PreTrainedModel,
        model_kwargs: dict[str, Any],
        cache: Any,
        rows: int,
        prompt_length: int,
    ) -> None:
        positions = model_kwargs["position_ids"]
        self._model, self._cache, self._rows = model, cache, rows
        self._windows = attention_windows(text_config(model)) or {}
        self.device = positions.device
        # Some models have several positions for each token: (..., R, 1)
        first = positions[..., -1:] - (prompt_length - 1)
        self._first_positions = first.expand(*first.shape[:-2], rows, 1)
        # Token types of output, (R, 1): the last one goes on, "no image" where there are images.
        self._token_types = {
            name: model_kwargs[name][:, -1:]
            if name == "token_type_ids"
            else model_kwargs[name][:, :1] * 0
            for name in _TOKEN_TYPES
            if model_kwargs.get(name) is not None
        }
        given_anew = (*CACHE_NAMES, *_TOKEN_TYPES, "attention_mask", "position_ids")
        self._others = {k: v for k, v in model_kwargs.items() if k not in given_anew}
        self._cache_name = cache_name(model_kwargs)

    def select(self, rows: list[int]) -> None:
        """Keeps these rows alone."""
        index, count, self._rows = torch.tensor(rows, dtype=torch.int64), self._rows, len(rows)
        self._first_positions = self._first_positions[..., index, :]
        self._token_types = {name: types[index] for name, types in self._token_types.items()}
        self._others = {
            name: value[index]
            if isinstance(value, torch.Tensor) and value.ndim > 0 and len(value) == count
            else value
            for name, value in self._others.items()
        }

    def join(self, other: MaskedInputs) -> None:
        """Adds the rows of another prefill, with the usual arguments alone."""
        self._rows += other._rows
        self._first_positions = torch.cat([self._first_positions, other._first_positions], dim=-2)

    def masks(self, seen_in: Callable[[int | None], np.ndarray]) -> Any:
        """The mask of a pass as attention takes it, `(R, 1, S, length)`. By a layer's window
        `seen_in` returns which entries the tokens see, bool `(R, S, length)`. Where the
        configuration names types of layers, there is one mask for each type."""
        masks = {}
        for kind, window in self._windows.items():
            mask = on_device(seen_in(window), self.device)[:, None]
            if attention_implementation(self._model) != "sdpa":  # eager: it is added to the scores
                bias = torch.zeros(mask.shape, dtype=self._model.dtype, device=mask.device)
                mask = bias.masked_fill_(~mask, torch.finfo(bias.dtype).min)
            masks[kind] = mask
        return masks.get("", masks)

    def of_pass(
        self,
        tokens: np.ndarray,
        places: np.ndarray,
        mask: Any,
        kept: int,
        of_row: np.ndarray | None = None,
    ) -> dict[str, Any]:
        """The arguments of a forward pass over tokens `(R, S)` that stand at these places of their
        rows, under [`~MaskedInputs.masks`]; `None` hides nothing. The logits of the last `kept` are
        wanted, 0 for all. Tokens `(1, S)` of several rows are each `of_row` `(S,)`."""
        rows, size = tokens.shape
        first = self._first_positions
        if of_row is not None:
            first = first[..., on_device(of_row, first.device), 0][..., None, :]
        types = {name: types.expand(rows, size) for name, types in self._token_types.items()}
        by_type = isinstance(mask, dict)
        model_inputs: dict[str, Any] = self._model.prepare_inputs_for_generation(
            on_device(tokens, self.device),
            next_sequence_length=size,
            attention_mask=next(iter(mask.values())) if by_type else mask,
            position_ids=first + on_device(places, self.device),
            **{self._cache_name: self._cache},
            **types,
            **self._others,
        )
        if by_type:
            model_inputs["attention_mask"] = mask
        if "logits_to_keep" in model_inputs:
            model_inputs["logits_to_keep"] = kept
        return model_inputs


def takes_masks(model: PreTrainedModel, model_kwargs: dict[str, Any]) -> bool:
    """Whether passes of a model can be given masks and positions: it needs position ids, an
    attention kernel that takes masks, layers that attend to the text or a sliding window, no images
    in the cache, and rotary frequencies that do not depend on the length of the text."""
    config, mask = text_config(model), model_kwargs.get("attention_mask")
    return (
        model_kwargs.get("position_ids") is not None
        and (mask is None or mask.ndim == 2)
        and attention_implementation(model) in ("sdpa", "eager")
        and not caches_images(config, model_kwargs)
        and not length_dependent_rope(config)
        and attention_windows(config) is not None
    )


def attends_packed(model: PreTrainedModel) -> bool:
    """Whether passes of a model may be packed: it attends by torch's attention, in transformers'
    own forward pass, which does not know rows by their number."""
    return (
        attention_implementation(model) == "sdpa"
        and type(model).forward.__module__.startswith("transformers.")
        and not has_compiled_call(model)
    )
