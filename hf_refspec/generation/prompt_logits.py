"""The target model's best next tokens inside the prompt, which the prefill has nearly computed.

`generate` asks the model for the logits after the last token of the prompt alone. What the output
layer would return after the others says what the model expects there, and costs that layer only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from ..drafting.top_tokens import TopTokens, top_tokens

# Tokens whose logits are there at once: 64 of a vocabulary of 150,000 take 38 MB in float32.
_PIECE = 64
# How far logits of the same states may be apart, beside the largest: in bfloat16 a pass over one
# token rounds otherwise than one over several, by less than a hundredth.
_ROUNDING = 0.02


def prompt_top_tokens(
    model: PreTrainedModel,
    states: Sequence[torch.Tensor],
    logits: torch.Tensor,
    k: int,
    fraction: float,
) -> TopTokens | None:
    """The best next tokens after the last tokens of the prompts, but not after the very last.

    Args:
        model (`PreTrainedModel`): The target model.
        states (sequence of `torch.Tensor`): What entered the output layer in the prefill,
            `(R, n, hidden_size)` each.
        logits (`torch.Tensor` of shape `(R, 1, vocab_size)`): The prefill's.
        k (`int`): How many next tokens.
        fraction (`float`): The most that it may cost, beside the prefill.

    Returns:
        [`TopTokens`] of shape `(R, m)`, for as many tokens as it may cost; `None` if that is none,
        or if the model's logits are not those of its output layer.
    """
    head = model.get_output_embeddings()
    if head is None or not states:
        return None
    hidden = torch.cat(list(states), dim=1)  # (R, n, hidden_size)
    positions = hidden.shape[1]
    count = int(min(positions - 1, fraction * positions / _relative_cost(model, head)))
    if count <= 0 or hidden.shape[0] != logits.shape[0]:
        return None
    if not _makes_the_logits(head, hidden[:, -1:], logits):
        return None
    pieces = [
        top_tokens(head(piece), k)
        for piece in hidden[:, positions - 1 - count : positions - 1].split(_PIECE, dim=1)
    ]
    return TopTokens(*(np.concatenate(parts, axis=1) for parts in zip(*pieces, strict=True)))


def _makes_the_logits(head: nn.Module, states: torch.Tensor, logits: torch.Tensor) -> bool:
    """Whether the output layer is all there is between these states and the logits: some models
    project before it, and scale or cap behind it."""
    weight = getattr(head, "weight", None)  # of quantised layers it may be a method
    if isinstance(weight, torch.Tensor) and weight.shape[-1] != states.shape[-1]:
        return False
    own = head(states).float()
    return own.shape == logits.shape and bool(
        (own - logits.float()).abs().max() <= _ROUNDING * logits.float().abs().max()
    )


def _relative_cost(model: PreTrainedModel, head: nn.Module) -> float:
    """What the output layer costs for a token, beside the layers before it."""
    own = {id(each) for each in head.parameters()}
    own |= {id(each) for each in model.get_input_embeddings().parameters()}
    before = sum(each.numel() for each in model.get_decoder().parameters() if id(each) not in own)
    # Quantised layers may have no parameters.
    return max(sum(each.numel() for each in head.parameters()), 1) / max(before, 1)
