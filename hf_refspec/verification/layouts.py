"""Layouts of a pass: how the tokens of its rows are arranged, and what each of them sees.

[`causal_pass`] runs one row in order, under the model's own mask. [`tree_pass`] runs any number of
rows, each with a tree of its own. Its rows follow one another where the model allows it
([`packed`]):

    the pass   r d d d r r d        r  root or pending token, d  draft node
    of row     0 0 0 0 1 2 2

Such a pass costs what its tokens cost, and pads nothing; `attention.py` attends. Models that this
does not suit, eager attention and arguments that know rows by their number take passes whose rows
are [`side_by_side`], as wide as the widest:

    row 0   p p p p x x r d d d             p  prompt, x  output, r  root, d  draft nodes
    row 1   p p x x x x x x r _ _ _         _  hidden by the mask: padding of the pass, and what
    row 2   p p p r d _ _                      follows a row

[`~slots.fixed_width_pass`] runs in a static cache.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from ..transformers_names import cache_name, next_kwargs
from .attention import AttentionProxy, PackedAttention, UnpackableError
from .caches import find_cache
from .entries import Entries, InPlaceEntries
from .passes import (
    Inputs,
    MaskedInputs,
    Pass,
    PassResult,
    Prefill,
    hidden_states_of,
    prepared,
    run_model,
    uploaded,
)


def tree_pass(
    model: PreTrainedModel, pass_: Pass, entries: InPlaceEntries, inputs: MaskedInputs
) -> PassResult:
    """All branches of the drafts of any number of rows (tree attention; REST, arXiv 2311.08252,
    3.3): [`packed`] where the model can be, else [`side_by_side`]. One row without a draft takes
    the very step of plain decoding, unless padding makes a pass cheaper."""
    is_plain = len(pass_.rows) == 1 and entries.sees_all(pass_)
    if entries.packs and not (is_plain and pass_.width in (None, pass_.size)):
        try:
            return packed(model, pass_, entries, inputs)
        except UnpackableError:
            entries.stop_packing(pass_.size)
    return side_by_side(model, pass_, entries, inputs)


def packed(
    model: PreTrainedModel, pass_: Pass, entries: InPlaceEntries, inputs: MaskedInputs
) -> PassResult:
    """One pass over all rows; padding of the pass follows the last of them."""
    order = entries.packed_order()
    sizes = [pass_.sizes[i] for i in order]
    count = sum(sizes)
    pass_tokens = max(pass_.width or 0, count)
    unused = pass_tokens - count
    roots = [0] * len(order)
    for i, end in zip(order, np.cumsum(sizes).tolist(), strict=True):
        roots[i] = end - len(pass_.drafts[i]) - 1
    tokens, indices, of_row = (
        np.pad(np.concatenate(parts), (0, unused), mode="edge")
        for parts in (
            [pass_.tokens[i] for i in order],
            [pass_.indices[i] for i in order],
            [np.full(pass_.sizes[i], i) for i in order],
        )
    )
    arrays = {"tokens": tokens[None], "positions": inputs.positions(indices[None], of_row)}
    windows = entries.window_of_layer
    attention = PackedAttention(
        pass_, entries.rows, order, windows, arrays, inputs.device, unused, not entries.compared
    )
    entries.attend_by(attention.write, attention.end, compares=not entries.compared)
    skipped = max(min(roots), 0)  # pending tokens before all roots
    model_inputs = inputs.of_pass(
        attention.tensors["tokens"],
        attention.tensors["positions"],
        AttentionProxy.of(attention, inputs.device),
        kept=pass_tokens - skipped,
    )
    outputs = run_model(model, model_inputs)
    attention.check()
    return PassResult(
        logits=outputs.logits[0, skipped - pass_tokens :][: count - skipped],
        roots=[root - skipped for root in roots],
        pass_tokens=pass_tokens,
        is_step=pass_.is_step,
        hidden_states=hidden_states_of(outputs, slice(count)),
    )


def side_by_side(
    model: PreTrainedModel, pass_: Pass, entries: InPlaceEntries, inputs: MaskedInputs
) -> PassResult:
    """Any number of rows, each with its own tree."""
    rows = entries.rows
    size = pass_.size
    end = entries.longest + size
    tokens, indices = pass_.aligned(size)
    arrays: dict[Any, np.ndarray] = {"tokens": tokens, "positions": inputs.positions(indices)}
    lengths = np.array([row.length for row in rows])
    if (lengths != lengths[0]).any():
        arrays["slots"] = lengths[:, None] + np.arange(size)
    sees_all = entries.sees_all(pass_)
    for window in () if sees_all else inputs.windows:
        slots = slice(entries.first_slot(window), end)
        masks = [row.mask(pass_, i, size, slots, window) for i, row in enumerate(rows)]
        arrays[window] = np.stack(masks)
    tensors = uploaded(arrays, inputs.device)
    entries.attend_by(partial(_write_rows, entries, tensors.get("slots"), end), end)
    kept = size - pass_.skipped
    mask = None if sees_all else inputs.as_models_take(tensors)
    model_inputs = inputs.of_pass(tensors["tokens"], tensors["positions"], mask, kept)
    outputs = run_model(model, model_inputs)
    return PassResult(
        logits=outputs.logits[:, -kept:].flatten(0, 1),
        roots=pass_.roots(kept),
        pass_tokens=size * len(rows),
        is_step=pass_.is_step,
        hidden_states=hidden_states_of(outputs, slice(None)),
    )


def _write_rows(
    entries: InPlaceEntries,
    slots: torch.Tensor | None,
    end: int,
    layer: int,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Writes the `(R, heads, S, head_dim)` keys and values of a pass into these `slots` `(R, S)`,
    or after rows of one length; returns all that attention sees."""
    count, _, size, _ = keys.shape
    attended = slice(entries.first_slot(entries.window_of_layer[layer]), end)
    cached = entries.rows[0].block.layers[layer]
    for tensor, new in zip(cached, (keys, values), strict=True):
        if slots is None:
            tensor[:count, :, end - size : end] = new
        else:
            rows = torch.arange(count, device=tensor.device)[:, None]
            tensor.transpose(1, 2)[rows, slots.to(tensor.device)] = new.transpose(1, 2)
    return cached[0][:count, :, attended], cached[1][:count, :, attended]


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
    model_inputs = inputs.of_pass(input_ids, pass_.size)
    if "logits_to_keep" in model_inputs:
        model_inputs["logits_to_keep"] = 1 + len(draft)
    outputs = run_model(model, model_inputs)
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
