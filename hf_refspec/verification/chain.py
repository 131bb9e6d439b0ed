"""The best path of a draft in one forward pass, one row whose tokens run in order.

The path stands under the model's own causal mask, so that it works with sliding windows, ALiBi,
FlashAttention and running states.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from ..drafting.tree import DraftTree
from ..text_config import text_config
from ..transformers_names import keeps_state_in_modules
from .cache import (
    CroppedEntries,
    Entries,
    RunningState,
    TokenSequence,
    caches_images,
    find_cache,
    fresh_kwargs,
    has_static_layers,
    holds_running_state,
)
from .verifier import PassLogits, Verifier


class ChainVerifier(Verifier):
    """For caches whose last entries can be cropped."""

    name = "chain"
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


class RecurrentVerifier(Verifier):
    """For caches that hold a running state."""

    name = "chain"
    entries_type = RunningState

    @classmethod
    def supports(cls, model: PreTrainedModel, model_kwargs: dict[str, Any]) -> bool:
        # A cache of the model's own kind may hold a state without saying so.
        cache = find_cache(model_kwargs)
        return cache is not None and not has_static_layers(cache)


class PlainVerifier(Verifier):
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
