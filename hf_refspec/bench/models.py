"""A Llama of some size with random weights: its speed is that of a trained one."""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

# Without an embedding and an output layer, which depend on the vocabulary. 1B has the shape of
# Llama 3.2 1B, 8B that of Llama 3.1 8B; the tiny one is for what does not depend on speed.
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
    """A Llama with random weights, made where it stays; the same one each time.

    Args:
        size (`str`): One of [`SIZES`].
        vocab_size (`int`): Of the tokenizer.
        device (`str`, *optional*, defaults to `"cpu"`): Where.
        dtype (`torch.dtype`, *optional*, defaults to `torch.float32`): Of the weights.
    """
    shape: dict[str, Any] = SIZES[size]
    config = LlamaConfig(vocab_size=vocab_size, max_position_embeddings=2**17, **shape)
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return model.eval()


def vocabulary_size(model: PreTrainedModel) -> int:
    """How many tokens a model knows."""
    return model.config.get_text_config(decoder=True).vocab_size


def context_length(model: PreTrainedModel) -> int:
    """How many tokens a model can read; the largest number where it does not say."""
    config = model.config.get_text_config(decoder=True)
    return getattr(config, "max_position_embeddings", None) or sys.maxsize
