"""The arguments of the forward passes after a prefill: [`OrderedInputs`] as `generate` prepares
them for tokens in order, [`MaskedInputs`] for tokens whose mask and positions are explicit."""

from __future__ import annotations

from collections.abc import Mapping
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
    next_kwargs,
)
from .caches import caches_images, find_cache, holds_running_state

_TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")


class Inputs:
    """What both kinds know of R prompts of this length (padding included).

    Attributes:
        prompt_length (`int`): The length of the prompts.
        offsets (`list[int]`): For each row, a token's position less its index: left padding has no
            position, and a given cache may hold tokens that the ids lack.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        model_kwargs: dict[str, Any],
        outputs: Mapping[str, Any],
        rows: int,
        prompt_length: int,
    ) -> None:
        self.model = model
        self.prompt_length = prompt_length
        # The position of each row's first token, int64 of shape (..., R): some models have several
        # positions for each token.
        self._first = np.zeros(rows, dtype=np.int64)
        positions = model_kwargs.get("position_ids")
        if positions is not None:
            last = positions[..., -1].numpy(force=True).astype(np.int64)
            first = last - (prompt_length - 1)
            self._first = np.broadcast_to(first, (*first.shape[:-1], rows))
        else:
            cache = find_cache(model_kwargs)
            if cache is not None and not holds_running_state(cache):
                self._first += max(cache.get_seq_length() - prompt_length, 0)

    def select(self, rows: list[int]) -> None:
        """Keeps these rows alone."""
        raise NotImplementedError(f"{type(self).__name__} have one row")

    def join(self, other: Any) -> None:
        """Adds the rows of another prefill, with the usual arguments alone."""
        raise NotImplementedError(f"{type(self).__name__} have one row")

    @property
    def offsets(self) -> list[int]:
        return self._first.reshape(-1, self._first.shape[-1]).max(axis=0).tolist()


class OrderedInputs(Inputs):
    """The arguments of passes over one row in order."""

    def __init__(
        self,
        model: PreTrainedModel,
        model_kwargs: dict[str, Any],
        outputs: Mapping[str, Any],
        rows: int,
        prompt_length: int,
    ) -> None:
        super().__init__(model, model_kwargs, outputs, rows, prompt_length)
        # The arguments for one more token than the prompt, some of them from the outputs.
        self._kwargs = next_kwargs(model, outputs, model_kwargs)

    def of_pass(self, input_ids: torch.Tensor, size: int) -> dict[str, Any]:
        """The arguments of a forward pass over the last `size` tokens of a text `(1, length)`."""
        model_inputs: dict[str, Any] = self.model.prepare_inputs_for_generation(
            input_ids, next_sequence_length=size, **self._kwargs_for(input_ids.shape[1])
        )
        return model_inputs

    def go_on_with(self, name: str, cache: Any) -> None:
        """Replaces the cache."""
        self._kwargs = {**self._kwargs, name: cache}

    def _kwargs_for(self, length: int) -> dict[str, Any]:
        """The keyword arguments (attention mask, position ids, token types) for this length."""
        further = length - self.prompt_length - 1
        if further == 0:
            return self._kwargs
        if further < 0:
            names = ("attention_mask", "position_ids", "token_type_ids")
            values = {name: self._kwargs.get(name) for name in names}
            cut = {
                name: value[..., :further] for name, value in values.items() if value is not None
            }
            return {**self._kwargs, **cut}
        kwargs = next_kwargs(self.model, {}, dict(self._kwargs), further)
        if (token_types := self._kwargs.get("token_type_ids")) is not None:
            # Plain decoding repeats the last type; the method above would repeat the last k types.
            repeated = token_types[:, -1:].expand(-1, further)
            kwargs["token_type_ids"] = torch.cat([token_types, repeated], dim=-1)
        return kwargs


class MaskedInputs(Inputs):
    """The arguments of passes over any number of rows, whose mask and positions are explicit."""

    def __init__(
        self,
        model: PreTrainedModel,
        model_kwargs: dict[str, Any],
        outputs: Mapping[str, Any],
        rows: int,
        prompt_length: int,
    ) -> None:
        super().__init__(model, model_kwargs, outputs, rows, prompt_length)
        self.device = model_kwargs["position_ids"].device
        self._windows = attention_windows(text_config(model)) or {}
        self._rows = rows
        # Token types of output, (R, 1): the last one goes on, "no image" where there are images.
        self._token_types = {
            name: model_kwargs[name][:, -1:]
            if name == "token_type_ids"
            else model_kwargs[name][:, :1] * 0
            for name in _TOKEN_TYPES
            if model_kwargs.get(name) is not None
        }
        new_in_each_pass = (*CACHE_NAMES, *_TOKEN_TYPES, "attention_mask", "position_ids")
        self._others = {k: v for k, v in model_kwargs.items() if k not in new_in_each_pass}
        self._others[cache_name(model_kwargs)] = find_cache(model_kwargs)

    def select(self, rows: list[int]) -> None:
        index = torch.tensor(rows, dtype=torch.int64).to(self.device, non_blocking=True)
        count = self._rows
        self._rows = len(rows)
        self._first = self._first[..., rows]
        self._token_types = {name: types[index] for name, types in self._token_types.items()}
        self._others = {
            name: value[index.to(value.device)]
            if isinstance(value, torch.Tensor) and value.ndim > 0 and len(value) == count
            else value
            for name, value in self._others.items()
        }

    def join(self, other: MaskedInputs) -> None:
        self._rows += other._rows
        self._first = np.concatenate([self._first, other._first], axis=-1)

    def positions(self, indices: np.ndarray, of_row: np.ndarray | None = None) -> np.ndarray:
        """The positions of tokens with these indices in their rows, `(R, S)`: int64 `(..., R, S)`.
        Tokens `(1, S)` of several rows are each `of_row` `(S,)`."""
        if of_row is None:
            return self._first[..., None] + indices
        return self._first[..., None, of_row] + indices

    @property
    def windows(self) -> list[int | None]:
        """The windows that a pass side by side has a mask for each."""
        return list(dict.fromkeys(self._windows.values()))

    def mask(self, seen: Mapping[int | None, torch.Tensor]) -> Any:
        """The mask of a pass as attention takes it, `(R, 1, S, length)`, by which entries the
        tokens see in each of the [`windows`], bool `(R, S, length)`. Where the configuration names
        types of layers, there is one mask for each type."""
        masks = {}
        for kind, window in self._windows.items():
            mask = seen[window][:, None]
            if attention_implementation(self.model) != "sdpa":  # eager: it is added to the scores
                bias = torch.zeros(mask.shape, dtype=self.model.dtype, device=mask.device)
                mask = bias.masked_fill_(~mask, torch.finfo(bias.dtype).min)
            masks[kind] = mask
        return masks.get("", masks)

    def of_pass(
        self, tokens: torch.Tensor, positions: torch.Tensor, mask: Any, kept: int
    ) -> dict[str, Any]:
        """The arguments of a forward pass over tokens `(R, S)` at these positions `(..., R, S)`,
        under a mask of [`mask`]; `None` hides nothing. The logits of the last `kept` are wanted, 0
        for all."""
        rows, size = tokens.shape
        types = {name: types.expand(rows, size) for name, types in self._token_types.items()}
        by_type = isinstance(mask, dict)
        model_inputs: dict[str, Any] = self.model.prepare_inputs_for_generation(
            tokens,
            next_sequence_length=size,
            attention_mask=next(iter(mask.values())) if by_type else mask,
            position_ids=positions,
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
    config = text_config(model)
    mask = model_kwargs.get("attention_mask")
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
