"""The arguments of forward passes whose mask and positions are given explicitly."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..text_config import length_dependent_rope, text_config
from ..transformers_names import (
    CACHE_NAMES,
    attention_implementation,
    cache_name,
    has_compiled_call,
)
from .cache import caches_images

_TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")


class MaskedInputs:
    """The arguments of forward passes after a prefill with these keyword arguments, over R prompts
    of these lengths (padding included), whose mask is given explicitly."""

    def __init__(
        self, model: PreTrainedModel, model_kwargs: dict[str, Any], cache: Any, prompts: list[int]
    ) -> None:
        rows, prompt_length = len(prompts), prompts[0]
        mask, positions = model_kwargs.get("attention_mask"), model_kwargs["position_ids"]
        prefilled = int(cache.get_seq_length())  # of a static cache it is a tensor
        self._model, self._cache = model, cache
        # False where a row is padded, (R, prefilled).
        self.prompt_mask = (
            torch.ones((rows, prefilled), dtype=torch.bool, device=positions.device)
            if mask is None
            else mask[:, :prefilled].to(positions.device, torch.bool)
        )
        self._find_padding()
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
        index, count = torch.tensor(rows, dtype=torch.int64), len(self.prompt_mask)
        self.prompt_mask = self.prompt_mask[index]
        self._find_padding()
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
        masks = self.prompt_mask, other.prompt_mask
        length = max(mask.shape[1] for mask in masks)
        self.prompt_mask = torch.cat(
            [nn.functional.pad(mask, (0, length - mask.shape[1]), value=True) for mask in masks]
        )
        self._find_padding()
        self._first_positions = torch.cat([self._first_positions, other._first_positions], dim=-2)

    def hides(self, index: int, skipped: int) -> bool:
        """Whether some tokens of a row are hidden beside the `skipped` ones."""
        return self._hidden[index] > skipped

    @property
    def is_padded(self) -> bool:
        return any(self._hidden)

    def _find_padding(self) -> None:
        # For each row, how many tokens are hidden, and how many of these stand before all others.
        hidden, leading = ~self.prompt_mask, self.prompt_mask.cumsum(dim=-1) == 0
        counts = torch.stack([hidden.sum(dim=-1), leading.sum(dim=-1)]).tolist()  # one wait
        self._hidden: list[int] = counts[0]
        self.padding: list[int] = counts[1]

    def of_pass(
        self,
        tokens: torch.Tensor,
        places: torch.Tensor,
        mask: Any,
        kept: int,
        of_row: torch.Tensor | None = None,
    ) -> dict[str, Any]:
        """The arguments of a forward pass over tokens `(R, S)` that stand at these places of their
        rows, `(R, S)` or `(1, S)`, under a mask as attention takes it; `None` hides nothing. The
        logits of the last `kept` are wanted, 0 for all. Tokens `(1, S)` of several rows are each
        `of_row` `(S,)`."""
        rows, size = tokens.shape
        first = self._first_positions
        if of_row is not None:
            first = first[..., of_row.to(first.device), 0][..., None, :]
        types = {name: types.expand(rows, size) for name, types in self._token_types.items()}
        model_inputs: dict[str, Any] = self._model.prepare_inputs_for_generation(
            tokens,
            next_sequence_length=size,
            attention_mask=mask,
            position_ids=first + places,
            **{self._cache_name: self._cache},
            **types,
            **self._others,
        )
        if "logits_to_keep" in model_inputs:
            model_inputs["logits_to_keep"] = kept
        return model_inputs


def takes_masks(model: PreTrainedModel, model_kwargs: dict[str, Any]) -> bool:
    """Whether passes of a model can be given masks and positions: it needs position ids, an
    attention kernel that takes masks, no images in the cache, and rotary frequencies that do not
    depend on the length of the text."""
    config, mask = text_config(model), model_kwargs.get("attention_mask")
    return (
        model_kwargs.get("position_ids") is not None
        and (mask is None or mask.ndim == 2)
        and attention_implementation(model) in ("sdpa", "eager")
        and not caches_images(config, model_kwargs)
        and not length_dependent_rope(config)
    )


def attends_packed(model: PreTrainedModel) -> bool:
    """Whether attention of a model may be asked by its mask: torch's, in transformers' own forward
    pass, which does not know rows by their number."""
    return (
        attention_implementation(model) == "sdpa"
        and type(model).forward.__module__.startswith("transformers.")
        and not has_compiled_call(model)
    )


def as_attention_takes(model: PreTrainedModel, mask: torch.Tensor) -> torch.Tensor:
    """A mask of bool `(R, 1, S, length)` as the model's attention takes it: eager attention adds it
    to the scores, in the model's dtype."""
    if attention_implementation(model) == "sdpa":
        return mask
    bias = torch.zeros(mask.shape, dtype=model.dtype, device=mask.device)
    return bias.masked_fill_(~mask, torch.finfo(model.dtype).min)
