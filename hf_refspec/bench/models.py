"""Llamas with random weights, which are as fast as trained ones."""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

# 1B has the shape of Llama 3.2 1B, 8B that of Llama 3.1 8B; the names leave out the embedding and
# output layers, whose sizes depend on the vocabulary. "tiny" is for replays of MAT alone.
SIZES: dict[str, dict[str, int]] = {
    "tiny": {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    },
    "500M": {
        "hidden_size": 1536,
        "intermediate_size": 4096,
        "num_hidden_layers": 14,
        "num_attention_heads": 12,
    },
    "1B": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "8B": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
}


def random_model(
    size: str, vocab_size: int, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> LlamaForCausalLM:
    """A Llama with random weights, created on its device; the same one each time.

    Args:
        size (`str`): One of [`SIZES`].
        vocab_size (`int`): The size of the vocabulary.
        device (`str`, *optional*, defaults to `"cpu"`): The device.
        dtype (`torch.dtype`, *optional*, defaults to `torch.float32`): Of the weights.
    """
    shape: dict[str, Any] = SIZES[size]
    config = LlamaConfig(vocab_size=vocab_size, max_position_embeddings=2**17, **shape)
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return model.eval()


def vocabulary_size(model: PreTrainedModel) -> int:
    """The size of a model's vocabulary."""
    return model.config.get_text_config(decoder=True).vocab_size


def context_length(model: PreTrainedModel) -> int:
    """A model's maximum context, in tokens; unlimited if its configuration has none."""
    config = model.config.get_text_config(decoder=True)
    return getattr(config, "max_position_embeddings", None) or sys.maxsize
