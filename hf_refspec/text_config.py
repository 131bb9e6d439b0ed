"""What a model's configuration says of its decoder, which in a vision-language model is a part."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel


def text_config(model: PreTrainedModel | PreTrainedConfig) -> Any:
    """The configuration of the decoder of a model, or of the decoder that a configuration has."""
    config = model if isinstance(model, PreTrainedConfig) else model.config
    return config.get_text_config(decoder=True)


def context_length(model: PreTrainedModel | PreTrainedConfig) -> int | None:
    """How many tokens a model can read; `None` if its configuration sets no limit."""
    config = text_config(model)
    return getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None)
