"""Weights in int8 with one scale for each row, as libraries for quantisation hold them.

Only public attributes and methods are read. A library whose `linear` also does something else (int8
activations, groups within a row) is left alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

Int8Weight: TypeAlias = tuple[Tensor, Tensor]  # int8 (outer, inner), and a scale for each row


def _of_torchao(weight: Any) -> Int8Weight | None:
    # Not every release has all of these.
    further = ("act_quant_kwargs", "act_pre_scale", "zero_point")
    computes_more = any(getattr(weight, name, None) is not None for name in further)
    return None if computes_more else (weight.qdata, weight.scale)


def _of_quanto(weight: Any) -> Int8Weight | None:
    parts: dict[str, Tensor] = {}
    weight.save_to_state_dict(parts, "", keep_vars=True)
    return parts["_data"], parts["_scale"]  # as its checkpoints name them


# By the package and the name of a weight's class.
_LAYOUTS: dict[tuple[str, str], Callable[[Any], Int8Weight | None]] = {
    ("torchao", "Int8Tensor"): _of_torchao,
    ("optimum", "WeightQBytesTensor"): _of_quanto,
}


def int8_weight(weight: Tensor) -> Int8Weight | None:
    """The numbers of a weight `(outer, inner)` whose product is `(x @ numbers.T) * scale`; `None`
    if it is no such weight."""
    kind = type(weight)
    read = _LAYOUTS.get((kind.__module__.partition(".")[0], kind.__qualname__))
    found = None if read is None else read(weight)
    if found is None:
        return None
    numbers, scale = found
    by_row = numbers.shape == weight.shape and scale.shape == (weight.shape[0], 1)
    return found if by_row and numbers.dtype == torch.int8 else None
