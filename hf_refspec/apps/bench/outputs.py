"""The new tokens of two calls of `generate`, compared."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

# Two float32 logits this close are a tie: a pass over several tokens may round them either way, in
# transformers' own prompt look-up too.
TIED_STEPS = 128


def rounding_steps(one: float, other: float, dtype: torch.dtype) -> float:
    """The distance of two logits in steps of rounding: the type's spacing at the larger one."""
    _, exponent = math.frexp(max(abs(one), abs(other)))
    return abs(one - other) / math.ldexp(torch.finfo(dtype).eps, exponent - 1)


@dataclass(frozen=True)
class Output:
    """What a call returned: the new tokens (of a forced text the tokens that the model would have
    chosen by itself at each place), and the passages that it retrieved, step by step."""

    tokens: list[int]
    passages: list[int] = field(default_factory=list)

    def differences(self, plain: Output) -> list[int]:
        """The places at which the tokens differ from those of plain decoding."""
        shorter, longer = sorted((len(self.tokens), len(plain.tokens)))
        pairs = enumerate(zip(self.tokens, plain.tokens, strict=False))
        return [*(i for i, (one, other) in pairs if one != other), *range(shorter, longer)]
