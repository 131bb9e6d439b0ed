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
        if isinstance(tokens, str):
            raise TypeError(f"vocabulary must be ids, but is {tokens!r}")
        self.ids = np.unique(to_ids("vocabulary", tokens, None)).astype(np.int64)
        layer = assistant.get_output_embeddings()
        name = type(assistant).__name__
        divides = type(layer) is nn.Linear and not layer.weight.is_meta
        if not divides or assistant.base_model is assistant:
            raise ValueError(
                "vocabulary needs an assistant with a linear output layer, not offloaded, but that "
                f"of {name} is {layer!r}; leave it out"
            )
        if self.ids[-1] >= layer.out_features:
            raise ValueError(
                f"vocabulary has the id {self.ids[-1]}, but {name} has {layer.out_features} tokens"
            )
        self._layer = layer
        self._state: object = None  # of the layer's weights when `_rows` were read

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Those of its tokens, `(1, n, len(ids))`, out of last hidden states `(1, n, d)`."""
        weight, bias = self._layer.weight.detach(), self._layer.bias
        state = weight.data_ptr(), weight._version, weight.dtype, weight.device
        if state != self._state:  # moved, converted or trained on
            ids = torch.from_numpy(self.ids).to(weight.device)
            self._rows = weight[ids], None if bias is None else bias.detach()[ids]
            self._state = state
        return nn.functional.linear(states.to(weight.device), *self._rows)
