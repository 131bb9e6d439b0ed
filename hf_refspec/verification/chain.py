"""The best path of a draft in one forward pass, one row whose tokens run in order.

The path stands under the model's own causal mask, so that it works with sliding windows, ALiBi,
FlashAttention and running states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from ..drafting.tree import DraftTree
from ..text_config import text_config
from ..transformers_names import keeps_state_in_modules, next_kwargs
from .cache import (
    CroppedEntries,
    Entries,
    Pass,
    RunningState,
    caches_images,
    find_cache,
    fresh_kwargs,
    has_static_layers,
    holds_running_state,
)
from .token_sequence import TokenSequence
from .verifier import PassLogits, Verifier


class SequentialVerifier(Verifier):
    """One row whose tokens are run in order, as `generate` runs them."""

    name = "chain"

    def _after_prefill(self, outputs: Mapping[str, Any]) -> None:
        # The arguments for one more token than the prompt, some of them from the outputs.
        self.model_kwargs = next_kwargs(self.model, outputs, self.model_kwargs)

    def _position_offsets(self, rows: int) -> list[int]:
        if self.model_kwargs.get("position_ids") is None and not holds_running_state(self.cache):
            return [self.cache.get_seq_length() - self._prompt_length]
        return super()._position_offsets(rows)

    def _run(self, now: Pass) -> PassLogits:
        [row], [draft] = now.rows, now.drafts
        input_ids = row.ids
        if len(draft):
            tokens = torch.from_numpy(draft.tokens)[None].to(input_ids.device, non_blocking=True)
            input_ids = torch.cat([input_ids, tokens], dim=-1)
        model_inputs = self.model.prepare_inputs_for_generation(
            input_ids, next_sequence_length=now.size, **self._kwargs_for(input_ids.shape[1])
        )
        if "logits_to_keep" in model_inputs:
            model_inputs["logits_to_keep"] = 1 + len(draft)
        outputs = self.model(**model_inputs, return_dict=True)
        if (cache := self._new_cache(outputs)) is not None:
            self.entries = self._entries(cache)
        return outputs.logits[0, -1 - len(draft) :], [0]

    def _kwargs_for(self, length: int) -> dict[str, Any]:
        """The keyword arguments (attention mask, position ids, token types) for this length."""
        further = length - self._prompt_length - 1
        if further == 0:
            return self.model_kwargs
        if further < 0:
            names = ("attention_mask", "position_ids", "token_type_ids")
            given = {name: self.model_kwargs.get(name) for name in names}
            cut = {name: value[..., :further] for name, value in given.items() if value is not None}
            return {**self.model_kwargs, **cut}
        kwargs = next_kwargs(self.model, {}, dict(self.model_kwargs), further)
        if (token_types := self.model_kwargs.get("token_type_ids")) is not None:
            # Plain decoding repeats the last type; the method above would repeat the last k types.
            repeated = token_types[:, -1:].expand(-1, further)
            kwargs["token_type_ids"] = torch.cat([token_types, repeated], dim=-1)
        return kwargs


class ChainVerifier(SequentialVerifier):
    """For caches whose last entries can be cropped."""

    entries_type = CroppedEntries

    @classmethod
    def supports(cls, model: PreTrainedModel, model_kwargs: dict[str, Any]) -> bool:
        cache = find_cache(model_kwargs)
        # A stateful model with another kind of cache keeps its state somewhere else.
        return (
            cache is not None
            and not has_static_layers(cache)
            and not holds_running_state(cache)
            and not keeps_state_in_modules(model)
            and not caches_images(text_config(model), model_kwargs)
        )


class RecurrentVerifier(SequentialVerifier):
    """For caches that hold a running state."""

    entries_type = RunningState

    @classmethod
    def supports(cls, model: PreTrainedModel, model_kwargs: dict[str, Any]) -> bool:
        # A cache of the model's own kind may hold a state without saying so.
        cache = find_cache(model_kwargs)
        return cache is not None and not has_static_layers(cache)


class PlainVerifier(SequentialVerifier):
    """One token a pass, for models that cannot take several tokens behind a cache. Speculative
    retrieval runs on them as well: when more than one token is pending, the whole text runs again,
    as in a call of its own."""

    name = "plain"
    takes_several_tokens = False

    def forward(self, rows: Sequence[TokenSequence], drafts: Sequence[DraftTree]) -> PassLogits:
        [row] = rows
        if self.cache is None:  # the state is not in a cache
            outputs = self.model(input_ids=row.ids, use_cache=False, return_dict=True)
            return outputs.logits[0, -1:], [0]
        if self.cached and len(row) - self.cached[0] > 1:
            self.begin_again(row)
        return super().forward(rows, drafts)

    def begin_again(self, row: TokenSequence) -> None:
        """Forgets the cache: the next pass is a prefill of the row as it is now."""
        if self.cache is not None:
            mask = torch.ones_like(row.ids)
            self.model_kwargs = fresh_kwargs(self.model, self.model_kwargs, mask)
            self.entries, self.cached = Entries(find_cache(self.model_kwargs)), []
