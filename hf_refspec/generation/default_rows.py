"""How many texts a running batch decodes at once, by the memory that is free."""

from __future__ import annotations

from typing import Any

import psutil
import torch
from transformers import PreTrainedModel

from ..text_config import context_length, text_config

# The length of a text by which the memory of a row is estimated.
_ROW_TOKENS = 4096


def default_rows(model: PreTrainedModel) -> int:
    """How many texts a running batch decodes at once, see [`~running_batch.RunningBatch`]."""
    config, device = text_config(model), model.device
    queries = _size(config, "num_attention_heads") or 1
    heads = _size(config, "num_key_value_heads") or queries
    head_dim = _size(config, "head_dim") or (_size(config, "hidden_size") or 4096) // queries
    layers = _size(config, "num_hidden_layers") or 32
    token = 2 * layers * heads * head_dim * model.dtype.itemsize  # bytes
    if device.type == "cuda":
        free, most = torch.cuda.mem_get_info(device)[0], 64
    else:
        free, most = psutil.virtual_memory().available, 16 if device.type == "cpu" else 64
    tokens = min(context_length(config) or _ROW_TOKENS, _ROW_TOKENS)
    return max(1, min(most, free // 2 // (tokens * token)))


def _size(config: Any, name: str) -> int | None:
    """A size of a model; `None` where it has none, or layers differ in it (Gemma 4)."""
    try:
        value = getattr(config, name, None)
    except RuntimeError:
        return None
    return value if isinstance(value, int) else None
