"""What a forward pass costs over its number of tokens."""

from __future__ import annotations

import copy
from time import perf_counter
from typing import Any

import torch
from transformers import PreTrainedModel

from .models import context_length, vocabulary_size

CONTEXT = 512
TOKENS = (1, 2, 4, 8, 16, 32, 64)
ROUNDS = 5


@torch.no_grad()
def measure_pass_costs(model: PreTrainedModel) -> dict[str, Any]:
    """Times forward passes over 1 to 64 tokens after a cached text, in turn.

    Args:
        model (`PreTrainedModel`): The target model.

    Returns:
        The length of that text, the model's parameters, and for each number of tokens, as far as
        its context holds them, the seconds of each round.
    """
    context = context_length(model)
    length = max(min(CONTEXT, context - TOKENS[-1]), 1)
    sizes = [tokens for tokens in TOKENS if length + tokens <= context]
    ids = torch.arange(length + TOKENS[-1], device=model.device)[None] % vocabulary_size(model)
    prefix = model(ids[:, :length], use_cache=True).past_key_values
    seconds: dict[str, list[float]] = {str(tokens): [] for tokens in sizes}
    for round in range(ROUNDS + 1):
        for tokens in sizes:
            cache = copy.deepcopy(prefix)  # a pass writes into it
            _wait(model)
            began = perf_counter()
            model(ids[:, length : length + tokens], past_key_values=cache, use_cache=True)
            _wait(model)
            if round > 0:  # the first is not counted
                seconds[str(tokens)].append(perf_counter() - began)
    return {"context": length, "parameters": model.num_parameters(), "seconds": seconds}


def _wait(model: PreTrainedModel) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
