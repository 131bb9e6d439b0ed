"""The target model: one from a folder or the Hub, or a Llama of some size with random weights."""

from __future__ import annotations

import re
import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

# Without an embedding and an output layer, which depend on the vocabulary. Some shapes are Llama's
# own: 1B is that of Llama 3.2 1B, 8B that of Llama 3.1 8B. The tiny one is for what does not depend
# on speed. Others are shaped as the first Llama was.
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


HEAD = 128
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([MB])")


def shape_of(size: str) -> dict[str, int]:
    """The shape of a Llama of about that size.

    Args:
        size (`str`): One of [`SIZES`], or as `"700M"` or `"3B"`.

    Raises:
        ValueError: If it is something else.
    """
    if size in SIZES:
        return SIZES[size]
    match = _SIZE.fullmatch(size)
    parameters = float(match[1]) * {"M": 1e6, "B": 1e9}[match[2]] if match else 0.0
    if parameters < 1e6:
        raise ValueError(
            f"--random-model {size} is no size: name one of {', '.join(SIZES)}, or another as 700M "
            "or 3B, from 1M on"
        )
    # A layer has about 12 times the squared width, and there is one for each head.
    heads = round((parameters / 12 / HEAD**2) ** (1 / 3))
    width = HEAD * heads
    return {
        "hidden_size": width,
        "intermediate_size": round(8 / 3 * width / HEAD) * HEAD,
        "num_hidden_layers": heads,
        "num_attention_heads": heads,
    }


def random_model(
    size: str, vocab_size: int, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> LlamaForCausalLM:
    """A Llama with random weights, made where it stays; its speed is that of a trained one.

    Args:
        size (`str`): See [`shape_of`].
        vocab_size (`int`): Of the tokenizer.
        device (`str`, *optional*, defaults to `"cpu"`): Where.
        dtype (`torch.dtype`, *optional*, defaults to `torch.float32`): Of the weights.
    """
    shape: dict[str, Any] = shape_of(size)
    config = LlamaConfig(vocab_size=vocab_size, max_position_embeddings=2**17, **shape)
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return model.eval()


def load_model(name: str, device: str, dtype: torch.dtype) -> PreTrainedModel:
    """Loads a trained model.

    Raises:
        ValueError: If there is none.
    """
    try:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
    except (OSError, ValueError) as error:
        raise ValueError(f"--model {name} cannot be loaded: {error}") from error
    return model.to(device).eval()


def context_length(model: PreTrainedModel) -> int:
    """How many tokens a model can read; the largest number where it does not say."""
    config = model.config.get_text_config(decoder=True)
    return getattr(config, "max_position_embeddings", None) or sys.maxsize


def check_device(device: str) -> None:
    """Refuses a GPU that is not there.

    Raises:
        ValueError: If torch sees none.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "device is 'cuda', but torch sees no GPU; use --device cpu, or install a torch with "
            "CUDA and check the driver"
        )
