"""How the next token is chosen: a request's options for `generate`, and its logits processors."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    LogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from .protocol import TextRequest

# Logits divided by less are no longer finite; the most probable token is chosen instead.
_LEAST_TEMPERATURE = 1e-5


class OutputPenalties(LogitsProcessor):
    """OpenAI's penalties: a token's logit falls by `frequency` for each time that the answer has it
    so far, and by `presence` if it has it at all. The prompt does not count."""

    def __init__(self, frequency: float, presence: float, prompt_length: int) -> None:
        self._frequency, self._presence = frequency, presence
        self._prompt_length = prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        for row, ids in zip(scores, input_ids[:, self._prompt_length :], strict=True):
            tokens, counts = ids.unique(return_counts=True)
            row[tokens] -= self._frequency * counts + self._presence
        return scores


def sampling_options(request: TextRequest) -> dict[str, Any]:
    """The options for `generate`; none if the request leaves them to the model."""
    asked = {"temperature": request.temperature, "top_p": request.top_p, "min_p": request.min_p}
    given: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    if request.top_k is not None:
        given["top_k"] = max(request.top_k, 0)
    if given.get("temperature", 1) < _LEAST_TEMPERATURE:
        given = {"do_sample": False}
    elif given:
        given["do_sample"] = True
    if request.repetition_penalty is not None:
        given["repetition_penalty"] = 1.0  # the model's own; the request's is a processor
    return given


def logits_processors(request: TextRequest, prompt_length: int) -> list[LogitsProcessor]:
    """What changes the logits before they are sampled from. They go by the ids alone, so that
    several rows may share them."""
    processors: list[LogitsProcessor] = []
    if request.logit_bias:
        biases = [[[token], float(bias)] for token, bias in request.logit_bias.items()]
        processors.append(SequenceBiasLogitsProcessor(biases))
    if (penalty := request.repetition_penalty) not in (None, 1):
        processors.append(RepetitionPenaltyLogitsProcessor(penalty))
    frequency, presence = request.frequency_penalty or 0, request.presence_penalty or 0
    if frequency or presence:
        processors.append(OutputPenalties(frequency, presence, prompt_length))
    return processors
