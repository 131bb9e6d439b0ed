"""Products of layers, as a pass computes them."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.nn.functional import linear
from transformers import LlamaConfig, LlamaForCausalLM

from hf_refspec.kernels import pass_kernels as kernels
from hf_refspec.kernels.pass_kernels import pass_kernels

CONFIG = LlamaConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
HERE = LlamaForCausalLM(CONFIG)  # a model on a CPU


def operands(dtype=torch.float32, tokens=4, inner=64, outer=50) -> tuple[torch.Tensor, ...]:
    """Tokens `(1, tokens, inner)`, a weight `(outer, inner)` and a bias `(outer,)`."""
    generator = torch.Generator().manual_seed(tokens)
    shapes = (1, tokens, inner), (outer, inner), (outer,)
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


def exact(x, weight, bias=None) -> torch.Tensor:
    return linear(x.double(), weight.double(), None if bias is None else bias.double())


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Counts the products that kernels of this package and oneDNN compute."""
    counts: Counter[str] = Counter()

    def counted(name: str) -> Callable[..., Any]:
        function = getattr(kernels, name)

        def call(*operands: Any) -> Any:
            counts[name] += 1
            return function(*operands)

        return call

    with (
        patch.object(kernels, "_computed", counted("_computed")),
        patch.object(kernels, "by_onednn", counted("by_onednn")),
    ):
        yield counts


def in_a_pass(
    product: Callable[..., Any], *operands: Any, quantised: bool = False
) -> tuple[Any, int]:
    """What a product returns in a pass of `HERE`, and how many of its products torch did not
    compute as ever."""
    with counting() as sent, pass_kernels(HERE, quantised):
        y = product(*operands)
    return y, sent.total()
