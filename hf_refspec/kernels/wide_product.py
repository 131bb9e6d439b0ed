"""Products of many tokens in float32: by oneDNN, where it is faster than the library that torch
calls.

torch multiplies float32 numbers by MKL, which does not use all of some CPUs: on an AMD EPYC with
AVX-512, oneDNN, which torch is built with, takes 0.6 of its time for 64 tokens, 0.85 for 500.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.backends import mkldnn
from torch.nn.functional import linear

# Products of fewer multiplications are left to torch: their call takes longer than they do.
LEAST = 1 << 22
# A trial: the products of so many tokens with square weights, alternately; weights that the CPU's
# caches do not hold, as those of a model.
_TOKENS, _SIZE, _WEIGHTS = 64, 1024, 8
_GAIN = 1.1  # how much faster oneDNN must be

_onednn: Any = None
if mkldnn.is_available():
    with suppress(AttributeError):  # which compiled models of torch call
        _onednn = torch.ops.mkldnn._linear_pointwise.default


def wide_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """`x @ weight.T + bias` of `x` `(..., inner)` and a weight `(outer, inner)`, in float32, if
    oneDNN computes it faster than torch."""
    if x.numel() * weight.shape[0] < LEAST or not mkldnn.enabled or not is_faster():
        return None
    return by_onednn(x, weight, bias)


def by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product by oneDNN."""
    return _onednn(x, weight, bias, "none", [], "")


@cache
def is_faster() -> bool:
    """True if oneDNN is clearly faster than torch on this CPU. It is found out once a process, so
    that all passes have the same bits."""
    if _onednn is None:
        return False
    x = torch.ones((_TOKENS, _SIZE), device="cpu", dtype=torch.float32)
    weights = torch.ones((_WEIGHTS, _SIZE, _SIZE), device="cpu", dtype=torch.float32)
    seconds: dict[Any, list[float]] = {linear: [], by_onednn: []}
    for weight in weights:
        for product, times in seconds.items():
            began = perf_counter()
            product(x, weight, None)
            times.append(perf_counter() - began)
    return median(seconds[linear]) > _GAIN * median(seconds[by_onednn])
