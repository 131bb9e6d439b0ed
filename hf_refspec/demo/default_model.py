"""The default model, and how models and tokenizers are loaded."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

DEFAULT_MODEL = str(Path(__file__).parent / "model")


def load_tokenizer(name: str | None = None) -> PreTrainedTokenizerBase:
    """Loads a tokenizer from a folder or the Hub; without a name the default model's.

    Raises:
        ValueError: If it cannot be loaded.
    """
    try:
        return AutoTokenizer.from_pretrained(name or DEFAULT_MODEL)
    except (OSError, ValueError) as error:
        raise ValueError(f"the tokenizer of {name} cannot be loaded: {error}") from error


def load_model(
    name: str | None = None, device: str | None = None, dtype: torch.dtype | None = None
) -> PreTrainedModel:
    """Loads a model from a folder or the Hub; without a name the default model.

    Args:
        name (`str`, *optional*): A folder or a Hub id.
        device (`str`, *optional*): The GPU by default, if there is one.
        dtype (`torch.dtype`, *optional*): By default float32 for the default model, so that all
            ids are equal, and for others the one that they were saved in.

    Raises:
        ValueError: If it cannot be loaded.
    """
    choice: torch.dtype | str = dtype or (torch.float32 if name is None else "auto")
    try:
        model = AutoModelForCausalLM.from_pretrained(name or DEFAULT_MODEL, dtype=choice)
    except (OSError, ValueError) as error:
        raise ValueError(f"the model {name} cannot be loaded: {error}") from error
    return model.to(device or ("cuda" if torch.cuda.is_available() else "cpu")).eval()
