"""The cost of passes over several tokens after long texts, in plain steps, with torch's kernels
and with the package's.

    python benchmarks/long_contexts.py [--dtypes float32 ...] [--context 300 ...] [--threads N]

The model is a random Llama of 0.2B: 12 layers, 16 heads that share the keys of 4. The plain step is
transformers' own, with its own cache. All sorts of passes alternate, and the fastest of each
counts.
"""

from __future__ import annotations

import argparse
import os
import time

import numpy as np
import torch
from suites import table
from transformers import DynamicCache, GenerationConfig, LlamaConfig, LlamaForCausalLM

import hf_refspec as rs
from hf_refspec.drafting.tree import DraftTree
from hf_refspec.verification.passes import FixedTokens
from hf_refspec.verification.verifier import TREE, Verifier

SIZES = (1, 2, 4, 8, 16, 32)
SWITCH = "HF_REFSPEC_NARROW_PRODUCTS"
KERNELS = {"torch's": "0", "ours": "1"}


def random_model(dtype: torch.dtype) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=12,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=2**15,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


def filled_cache(model: LlamaForCausalLM, length: int) -> DynamicCache:
    """A cache of random keys and values, for which no prompt has to run."""
    config = model.config
    cache = DynamicCache(config=config)
    shape = (1, config.num_key_value_heads, length, config.head_dim)
    for layer in range(config.num_hidden_layers):
        cache.update(*torch.randn(2, *shape).to(model.dtype), layer)
    return cache


class PlainSteps:
    """transformers' step over one token."""

    def __init__(self, model: LlamaForCausalLM, length: int) -> None:
        self.model = model
        self.length = length
        self.cache = filled_cache(model, length)

    def seconds(self) -> float:
        began = time.perf_counter()
        self.model(
            input_ids=torch.tensor([[5]]),
            attention_mask=torch.ones(1, self.length + 1, dtype=torch.int64),
            position_ids=torch.tensor([[self.length]]),
            past_key_values=self.cache,
        )
        taken = time.perf_counter() - began
        self.cache.crop(-1)
        return taken


class Passes:
    """Passes over the last token of a text and a chain, none of which is kept."""

    def __init__(self, model: LlamaForCausalLM, length: int) -> None:
        ids = torch.randint(1000, 30000, (1, length + 1))
        arguments = {
            "past_key_values": filled_cache(model, length - 1),
            "attention_mask": torch.ones(1, length, dtype=torch.int64),
            "position_ids": torch.arange(length)[None],
            "use_cache": True,
        }
        config = GenerationConfig(return_dict_in_generate=True)
        self.verifier = Verifier(TREE, model, config, arguments)
        self.verifier.forward([FixedTokens(ids[:, :length])], [DraftTree.empty()])
        self.row = FixedTokens(ids)

    def seconds(self, size: int) -> float:
        draft = DraftTree.chain(np.arange(1000, 1000 + size - 1))
        began = time.perf_counter()
        self.verifier.forward([self.row], [draft])
        taken = time.perf_counter() - began
        self.verifier.entries.undo()
        return taken


@torch.no_grad()
def measure(model: LlamaForCausalLM, length: int, rounds: int) -> list[list[object]]:
    """A line of the table for each sort of kernels."""
    plain = PlainSteps(model, length)
    passes = Passes(model, length)
    steps = []
    seconds: dict[tuple[str, int], list[float]] = {(k, n): [] for k in KERNELS for n in SIZES}
    for _ in range(rounds):
        steps.append(plain.seconds())
        for size in SIZES:
            for kernels, value in KERNELS.items():
                os.environ[SWITCH] = value
                seconds[kernels, size].append(passes.seconds(size))
    dtype = str(model.dtype).removeprefix("torch.")
    return [
        [dtype, length, kernels, f"{1000 * min(steps):.1f}"]
        + [f"{min(seconds[kernels, size]) / min(steps):.2f}" for size in SIZES]
        for kernels in KERNELS
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--context", nargs="+", type=int, default=[300, 3000, 8000])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rs.warmup()
    rows = []
    for dtype in args.dtypes:
        model = random_model(getattr(torch, dtype))
        for length in args.context:
            rows += measure(model, length, args.rounds)
    print(table(["dtype", "context", "kernels", "plain ms", *map(str, SIZES)], rows))


if __name__ == "__main__":
    main()
