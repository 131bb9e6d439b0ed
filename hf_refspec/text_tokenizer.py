"""The tokenizer, which in a vision-language model is one part of its processor."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase


def text_tokenizer(tokenizer: Any) -> Any:
    """A multimodal processor's tokenizer. Anything else is returned as it is."""
    if isinstance(tokenizer, PreTrainedTokenizerBase):  # which may wrap another library's
        return tokenizer
    return getattr(tokenizer, "tokenizer", tokenizer)
