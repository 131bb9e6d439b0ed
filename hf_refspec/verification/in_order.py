"""Passes over one row whose tokens run in order, under the model's own mask: a chain, or no draft.

The cache keeps the accepted tokens by cropping its end ([`CroppedEntries`]) or by going back to an
earlier state ([`RunningState`]).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import Cache, PreTrainedModel

from ..kernels.pass_kernels import pass_kernels
from ..transformers_names import cache_name, next_kwargs
from .caches import crop_layers, find_cache, restore, snapshot
from .entries import Entries
from .passes import Inputs, Pass, PassResult, Prefill, hidden_states_of, prepared


def causal_pass(
    model: PreTrainedModel, pass_: Pass, entries: Entries, inputs: OrderedInputs
) -> PassResult:
    """One row whose tokens run in order, as `generate` runs them: a chain, or no draft at all. The
    model's own causal mask hides what must be hidden, also with sliding windows, ALiBi,
    FlashAttention and running states."""
    [row] = pass_.rows
    [draft] = pass_.drafts
    input_ids = row.ids
    if len(draft):
        tokens = torch.from_numpy(draft.tokens)[None].to(input_ids.device, non_blocking=True)
        input_ids = torch.cat([input_ids, tokens], dim=-1)
    model_inputs = inputs.of_pass(input_ids, pass_.size, kept=1 + len(draft))
    with pass_kernels(model, inputs.quantised):
        outputs = model(**model_inputs, return_dict=True)
    cache = find_cache(outputs)
    if cache is not None and cache is not entries.cache:
        # Some models begin a new one where the text outgrows their rotary embedding (Phi-3).
        inputs.go_on_with(cache_name(outputs), cache)
        entries.replace(cache)
    return PassResult(
        logits=outputs.logits[0, -1 - len(draft) :],
        roots=[0],
        pass_tokens=pass_.size,
        is_step=pass_.is_step or entries.reruns,
        hidden_states=hidden_states_of(outputs, slice(-pass_.size, None)),
    )


class OrderedInputs(Inputs):
    """The arguments of passes over one row in order."""

    def __init__(self, prefill: Prefill) -> None:
        super().__init__(prefill)
        # The arguments for one more token than the prompt, some of them from the outputs.
        self._kwargs = next_kwargs(prefill.model, prefill.outputs, prefill.model_kwargs)

    def of_pass(self, input_ids: torch.Tensor, size: int, kept: int) -> dict[str, Any]:
        """The arguments of a forward pass over the last `size` tokens of a text `(1, length)`, of
        which the logits of the last `kept` are wanted."""
        kwargs = self._kwargs
        further = input_ids.shape[1] - self.prompt_length - 1
        if further > 0:
            token_types = kwargs.get("token_type_ids")
            kwargs = next_kwargs(self.model, {}, dict(kwargs), further)
            if token_types is not None:
                # Plain decoding repeats the last type; `next_kwargs` would repeat the last k types.
                repeated = token_types[:, -1:].expand(-1, further)
                kwargs["token_type_ids"] = torch.cat([token_types, repeated], dim=-1)
        return prepared(self.model, input_ids, size, kept, **kwargs)

    def go_on_with(self, name: str, cache: Any) -> None:
        """Replaces the cache."""
        self._kwargs = {**self._kwargs, name: cache}


class CroppedEntries(Entries):
    """One row in order: the rejected tokens are cropped from the end."""

    def begin(self, prefill: Prefill) -> None:
        # Not before: a sliding window that records through the prefill would keep all of it.
        self.cache.activate_past_recording()

    def replace(self, cache: Cache) -> None:
        self.close([])
        self.cache = cache
        cache.activate_past_recording()

    def before(self, pass_: Pass) -> None:
        self._length = self.cache.get_seq_length()

    def keep(self, pass_: Pass, paths: Sequence[list[int] | None]) -> list[int]:
        [path] = paths
        [draft] = pass_.drafts
        if path is None:
            self.undo()
        else:
            # Even if nothing is dropped: it shrinks a recording sliding window back to its size.
            self.cache.crop(len(path) - len(draft))
        return pass_.cached_after(paths)

    def undo(self) -> None:
        crop_layers(self.cache, self._length)

    def close(self, cached: list[int]) -> None:
        for layer in self.cache.layers:
            if hasattr(layer, "record_past"):
                layer.record_past = False


class RunningState(Entries):
    """A state that cannot be cropped (Mamba 2, linear attention). The one from before the draft is
    restored, and the accepted tokens run again together with the next draft, so that a rejection
    costs no pass of its own."""

    reruns = True
    variant = "running state"

    def before(self, pass_: Pass) -> None:
        self._before = snapshot(self.cache) if len(pass_.drafts[0]) else None

    def keep(self, pass_: Pass, paths: Sequence[list[int] | None]) -> list[int]:
        [path] = paths
        [draft] = pass_.drafts
        if len(draft) == 0 or (path is not None and len(path) == len(draft)):
            return super().keep(pass_, paths)
        self.undo()
        return pass_.cached

    def undo(self) -> None:
        if self._before is not None:
            restore(self.cache, self._before)
