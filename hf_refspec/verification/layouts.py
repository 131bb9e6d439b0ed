"""How the tokens of a pass are laid out in one forward pass of the model.

| layout | tokens | mask | entries |
| --- | --- | --- | --- |
| [`in_order`] | one row's path, `(1, S)` | the model's own causal mask | cropped, running state |
| [`packed`] | all rows one behind another, `(1, N)` | each row's own tree | in place, many blocks |
| [`side_by_side`] | each row by itself, `(R, S)` | the same, 4D | in place, one block |
| [`padded`] | the same, to one of a few widths | the same, 4D | slots of a static cache |

Side by side, a pass is as wide as its widest row:

    row 0   p p p p x x r d d d             p  prompt, x  output, r  root, d  draft nodes
    row 1   p p x x x x x x r _ _ _         _  what the mask hides: padding of the pass, and what
    row 2   p p p r d _ _                      stands behind a row

Packed, it costs what its tokens cost and pads nothing, see `attention.py`. That takes a model that
attends by torch's attention to what it caches; multi-head latent attention, eager attention and
arguments that know rows by their number stand side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from ..transformers_names import cache_name
from .attention import PackedAttention, PackedMask, UnpackableError
from .caches import find_cache
from .eager_kernels import eager_kernels
from .entries import Entries
from .in_place import InPlaceEntries, RowEntries, Running, seen_entries
from .inputs import MaskedInputs, OrderedInputs
from .model_memo import memo_of
from .passes import Pass, PassResult, uploaded
from .prompt_logits import last_token, records_prompt
from .slots import SlottedEntries

_UNPACKABLE = "attends to something else than it caches"


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
        entries.cache = cache
    logits = outputs.logits[0, -1 - len(draft) :]
    return PassResult(logits, [0], now.size, is_step=now.is_step or entries.reruns)


def branching(
    model: PreTrainedModel, now: Pass, entries: InPlaceEntries, inputs: MaskedInputs
) -> PassResult:
    """All branches of the drafts of any number of rows (tree attention; REST, arXiv 2311.08252,
    3.3): [`packed`] where the model can be, else [`side_by_side`]. One row without a draft takes
    the very step of plain decoding, unless padding makes a pass cheaper."""
    is_plain = len(now.rows) == 1 and _takes_no_mask(now, entries.rows)
    if entries.packs and not (is_plain and now.padded_size(now.size) == now.size):
        try:
            return packed(model, now, entries, inputs)
        except UnpackableError:
            memo_of(model)[_UNPACKABLE] = True
            entries.stop_packing(now.size)
    return side_by_side(model, now, entries, inputs)


def is_unpackable(model: PreTrainedModel) -> bool:
    """Whether a packed pass has found that the model attends to something else than it caches."""
    return _UNPACKABLE in memo_of(model)


def packed(
    model: PreTrainedModel, now: Pass, entries: InPlaceEntries, inputs: MaskedInputs
) -> PassResult:
    """Rows one behind another, each with a tree and entries of its own."""
    order = entries.packed_order()
    sizes = [now.sizes[i] for i in order]
    count = sum(sizes)
    pass_tokens = now.padded_size(count)
    unused = pass_tokens - count
    roots = [0] * len(order)
    for i, end in zip(order, np.cumsum(sizes).tolist(), strict=True):
        roots[i] = end - len(now.drafts[i]) - 1
    attention = PackedAttention(
        now, entries.rows, order, entries.windows, unused, compares=not entries.compared
    )
    tokens, indices, of_row = (
        np.pad(np.concatenate(parts), (0, unused), mode="edge")
        for parts in (
            [now.tokens[i] for i in order],
            [now.indices[i] for i in order],
            [np.full(now.sizes[i], i) for i in order],
        )
    )
    arrays = {
        **attention.arrays,
        "tokens": tokens[None],
        "positions": inputs.positions(indices[None], of_row),
    }
    attention.tensors = uploaded(arrays, inputs.device)
    entries.running = Running(attention.write, attention.end)
    skipped = max(min(roots), 0)  # pending tokens before all roots
    logits, states = _run(
        model,
        inputs.of_pass(
            attention.tensors["tokens"],
            attention.tensors["positions"],
            PackedMask.of(attention, inputs.device),
            kept=pass_tokens - skipped,
        ),
        now.records,
    )
    attention.check()
    entries.compared = True
    return PassResult(
        logits=logits[0, skipped - pass_tokens :][: count - skipped],
        roots=[root - skipped for root in roots],
        pass_tokens=pass_tokens,
        is_step=now.is_step,
        states=states,
    )


def side_by_side(
    model: PreTrainedModel, now: Pass, entries: InPlaceEntries, inputs: MaskedInputs
) -> PassResult:
    """Each row beside the others, in one block, under the model's own attention."""
    rows = entries.rows
    size = now.size
    starts = [row.length for row in rows]
    end = max(starts) + size
    tokens, indices = _aligned(now, size)
    arrays: dict[Any, np.ndarray] = {"tokens": tokens, "positions": inputs.positions(indices)}
    if min(starts) != max(starts):
        arrays["slots"] = np.array(starts)[:, None] + np.arange(size)
    takes_no_mask = _takes_no_mask(now, rows)
    if not takes_no_mask:
        members = range(len(rows))
        for window in inputs.windows:
            seen = slice(_first_seen(rows, window), end)
            arrays[window] = seen_entries(now, rows, members, size, seen, window)
    tensors = uploaded(arrays, inputs.device)
    entries.running = Running(partial(_write_rows, entries, tensors.get("slots"), end), end)
    skipped = max(min(now.pending) - 1, 0)
    kept = size - skipped
    mask = None if takes_no_mask else inputs.mask(tensors)
    model_inputs = inputs.of_pass(tensors["tokens"], tensors["positions"], mask, kept)
    logits, states = _run(model, model_inputs, now.records)
    roots = [i * kept + pending - 1 - skipped for i, pending in enumerate(now.pending)]
    return PassResult(
        logits=logits[:, -kept:].flatten(0, 1),
        roots=roots,
        pass_tokens=size * len(rows),
        is_step=now.is_step,
        states=states,
    )


def padded(
    model: PreTrainedModel, now: Pass, entries: SlottedEntries, inputs: MaskedInputs
) -> PassResult:
    """Rows side by side, padded to one of a few widths that can be compiled, in a static cache."""
    width = entries.width_of_pass(now)
    targets = entries.targets(width)
    tokens, indices = _aligned(now, width)
    arrays: dict[Any, np.ndarray] = {
        "tokens": tokens,
        "positions": inputs.positions(indices),
        "targets": targets,
    }
    for window in inputs.windows:
        arrays[window] = entries.seen(now, indices + entries.prior_length, targets, window)
    tensors = uploaded(arrays, inputs.device)
    entries.slots.targets = tensors["targets"]
    mask = inputs.mask(tensors)
    model_inputs = inputs.of_pass(tensors["tokens"], tensors["positions"], mask, kept=0)  # all
    logits, was_prepared = entries.run(model_inputs, width)
    skipped = max(min(now.pending) - 1, 0)
    logits = logits[:, skipped : now.size]
    roots = [i * logits.shape[1] + p - 1 - skipped for i, p in enumerate(now.pending)]
    return PassResult(
        logits=logits.flatten(0, 1),
        roots=roots,
        pass_tokens=width * len(now.rows),
        is_step=now.is_step and not was_prepared,
    )


def _run(
    model: PreTrainedModel, model_inputs: dict[str, Any], records: bool
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The logits of a forward pass and, if it `records`, the inputs of the output layer."""
    states: list[torch.Tensor] = []
    if records and records_prompt(model, model_inputs):
        model_inputs["logits_to_keep"] = last_token(states)
    with eager_kernels(model):
        logits = model(**model_inputs, return_dict=True).logits
    return logits, states


def _aligned(now: Pass, size: int) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of all rows side by side and their indices, int64 `(R, size)`. Those that a row
    lacks repeat the last token of its text."""
    tokens = np.empty((len(now.rows), size), dtype=np.int64)
    indices = np.empty_like(tokens)
    for i, row in enumerate(now.rows):
        count = now.sizes[i]
        if count < size:
            tokens[i] = row.tail(1)[0]
        tokens[i, :count] = now.tokens[i]
        indices[i] = len(row) - 1
        indices[i, :count] = now.indices[i]
    return tokens, indices


def _takes_no_mask(now: Pass, rows: Sequence[RowEntries]) -> bool:
    """Whether a pass is the next tokens of equally long rows, without drafts, each of which sees
    all before it: the very step of plain decoding, or several tokens of it at once."""
    return (
        min(now.pending) == now.size
        and len({(row.length, row.skipped) for row in rows}) == 1
        and all(row.hidden is None for row in rows)
    )


def _first_seen(rows: Sequence[RowEntries], window: int | None) -> int:
    """The first entry that some token of a pass sees."""
    return min(row.begin(window) for row in rows)


def _write_rows(
    entries: InPlaceEntries,
    slots: torch.Tensor | None,
    end: int,
    layer: int,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Writes what a layer computed of a pass side by side, `(R, heads, S, head_dim)`, into these
    `slots` `(R, S)`, or behind rows of one length; returns what it hands to attention."""
    rows = entries.rows
    count, _, size, _ = keys.shape
    seen = slice(_first_seen(rows, entries.windows[layer]), end)
    states = rows[0].block.layers[layer]
    for own, new in zip(states, (keys, values), strict=True):
        if slots is None:
            own[:count, :, end - size : end] = new
        else:
            places = slots.to(own.device)
            at = torch.arange(count, device=own.device)[:, None]
            own.transpose(1, 2)[at, places] = new.transpose(1, 2)
    return states[0][:count, :, seen], states[1][:count, :, seen]
