"""Passes over one row whose tokens run in order, as `generate` runs them."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from ..transformers_names import cache_name, next_kwargs
from .caches import find_cache
from .eager_kernels import eager_kernels
from .entries import Entries
from .passes import Inputs, Pass, PassResult, Prefill, prepared


def in_order(
    model: PreTrainedModel, now: Pass, entries: Entries, inputs: OrderedInputs
) -> PassResult:
    """One row whose tokens run in order, as `generate` runs them: a chain, or no draft at all.

    It stands under the model's own causal mask, so that it works with sliding windows, ALiBi,
    FlashAttention and running states.
    """
    [row] = now.rows
    [draft] = now.drafts
    input_ids = row.ids
    if len(draft):
        tokens = torch.from_numpy(draft.tokens)[None].to(input_ids.device, non_blocking=True)
        input_ids = torch.cat([input_ids, tokens], dim=-1)
    model_inputs = inputs.of_pass(input_ids, now.size)
    if "logits_to_keep" in model_inputs:
        model_inputs["logits_to_keep"] = 1 + len(draft)
    with eager_kernels(model):
        outputs = model(**model_inputs, return_dict=True)
    cache = find_cache(outputs)
    if cache is not None and cache is not entries.cache:
        # Some models begin a new one where the text outgrows their rotary embedding (Phi-3).
        inputs.go_on_with(cache_name(outputs), cache)
        entries.replace(cache)
    logits = outputs.logits[0, -1 - len(draft) :]
    return PassResult(logits, [0], now.size, is_step=now.is_step or entries.reruns)


class OrderedInputs(Inputs):
    """The arguments of passes over one row in order."""

    def __init__(self, prefill: Prefill) -> None:
        super().__init__(prefill)
        # The arguments for one more token than the prompt, some of them from the outputs.
        self._kwargs = next_kwargs(prefill.model, prefill.outputs, prefill.model_kwargs)

    def of_pass(self, input_ids: torch.Tensor, size: int) -> dict[str, Any]:
        """The arguments of a forward pass over the last `size` tokens of a text `(1, length)`."""
        return prepared(self.model, input_ids, size, **self._kwargs_for(input_ids.shape[1]))

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
