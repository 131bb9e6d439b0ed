"""Passes in which rows stand side by side, in one block, under the model's own attention.

A pass is as wide as its widest row:

    row 0   p p p p x x r d d d             p  prompt, x  output, r  root, d  draft nodes
    row 1   p p x x x x x x r _ _ _         _  hidden by the mask: padding of the pass, and what
    row 2   p p p r d _ _                      stands behind a row
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from .in_place import CurrentPass, InPlaceEntries
from .passes import MaskedInputs, Pass, PassResult, run_model, uploaded


def side_by_side(
    model: PreTrainedModel, now: Pass, entries: InPlaceEntries, inputs: MaskedInputs
) -> PassResult:
    """Any number of rows, each with its own tree."""
    rows = entries.rows
    size = now.size
    end = entries.longest + size
    tokens, indices = now.aligned(size)
    arrays: dict[Any, np.ndarray] = {"tokens": tokens, "positions": inputs.positions(indices)}
    lengths = np.array([row.length for row in rows])
    if (lengths != lengths[0]).any():
        arrays["slots"] = lengths[:, None] + np.arange(size)
    sees_all = entries.sees_all(now)
    for window in () if sees_all else inputs.windows:
        slots = slice(entries.first_seen(window), end)
        seen = [row.seen(now, i, size, slots, window) for i, row in enumerate(rows)]
        arrays[window] = np.stack(seen)
    tensors = uploaded(arrays, inputs.device)
    entries.current = CurrentPass(partial(_write_rows, entries, tensors.get("slots"), end), end)
    kept = size - now.skipped
    mask = None if sees_all else inputs.mask(tensors)
    model_inputs = inputs.of_pass(tensors["tokens"], tensors["positions"], mask, kept)
    logits, states = run_model(model, model_inputs, now.records)
    return PassResult(
        logits=logits[:, -kept:].flatten(0, 1),
        roots=now.roots(kept),
        pass_tokens=size * len(rows),
        is_step=now.is_step,
        states=states,
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
    or behind rows of one length; returns those that attention sees."""
    count, _, size, _ = keys.shape
    seen = slice(entries.first_seen(entries.window_of_layer[layer]), end)
    cached = entries.rows[0].block.layers[layer]
    for tensor, new in zip(cached, (keys, values), strict=True):
        if slots is None:
            tensor[:count, :, end - size : end] = new
        else:
            rows = torch.arange(count, device=tensor.device)[:, None]
            tensor.transpose(1, 2)[rows, slots.to(tensor.device)] = new.transpose(1, 2)
    return cached[0][:count, :, seen], cached[1][:count, :, seen]
