"""The tokens that an assistant may draft, and its output layer for them alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from .token_ids import to_ids


class DraftVocabulary:
    """Some of an assistant's tokens. Its output layer is read for them alone: of a small model that
    is the larger part of a pass (FR-Spec, Zhao et al. 2025, arXiv 2502.14856, section 3).

    Args:
        assistant (`PreTrainedModel`): With a linear output layer.
        tokens: Their ids, in any form.

    Attributes:
        ids (`np.ndarray`, int64 of shape `(n,)`): The same, in increasing order.

    Raises:
        TypeError: If the ids are no integers.
        ValueError: If an id is not the assistant's, or the output layer cannot be divided.
    """

    def __init__(self, assistant: PreTrainedModel, tokens: Any) -> None:
        self.ids = np.unique(to_ids("vocabulary", tokens, None)).astype(np.int64)
        layer = assistant.get_output_embeddings()
        name = type(assistant).__name__
        if type(layer) is not nn.Linear or layer.weight.is_meta:
            raise ValueError(
                "vocabulary needs an assistant with a linear output layer, not offloaded, but that "
                f"of {name} is {layer!r}; leave it out"
            )
        if self.ids[-1] >= layer.out_features:
            raise ValueError(
                f"vocabulary has the id {self.ids[-1]}, but {name} has {layer.out_features} tokens"
            )
        rows = torch.from_numpy(self.ids).to(layer.weight.device)
        self._weight = layer.weight.detach()[rows]
        self._bias = None if layer.bias is None else layer.bias.detach()[rows]

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Those of its tokens, `(1, n, len(ids))`, out of last hidden states `(1, n, d)`."""
        states = states.to(self._weight.device)
        return nn.functional.linear(states, self._weight, self._bias)
