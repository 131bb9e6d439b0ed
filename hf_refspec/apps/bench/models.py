"""Llamas with random weights, as fast as trained ones."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

# Hidden size, intermediate size, layers, attention heads, key-value heads. 8B has the shape of
# Llama 3.1 8B; the names leave out the embedding and output layers, whose sizes depend on the
# vocabulary. "tiny" is for replays of MAT alone.
SIZES = {
    "tiny": (16, 16, 1, 1, 1),
    "500M": (1536, 4096, 14, 12, 12),
    "8B": (4096, 14336, 32, 32, 8),
}


def random_model(
    size: str,
    vocab_size: int,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    kind: type[LlamaForCausalLM] = LlamaForCausalLM,
) -> Any:
    """A Llama of one of [`SIZES`] with random weights, created on its device; always the same."""
    hidden, intermediate, layers, heads, key_value_heads = SIZES[size]
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        max_position_embeddings=2**17,
    )
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(0)
        return kind._from_config(config, dtype=dtype, attn_implementation="sdpa").eval()
