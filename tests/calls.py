"""What the tests of `generate` have in common."""

from __future__ import annotations

import torch
from transformers import LogitsProcessor
from transformers.generation.streamers import BaseStreamer

PROMPT = torch.tensor([[5, 9, 12, 7, 5, 9, 33, 12, 7]])


def prepared(model, input_ids, **kwargs):
    """The generation config and the keyword arguments of the forward pass that `generate` prepares
    for its decoding loop."""
    taken = []

    def taking(
        model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs
    ):
        taken.extend([generation_config, model_kwargs])
        return input_ids

    model.generate(input_ids, custom_generate=taking, **kwargs)
    return taken


class Forced(LogitsProcessor):
    """Makes the model say a given text."""

    def __init__(self, ids):
        self.ids = ids[0]

    def __call__(self, input_ids, scores):
        forced = torch.full_like(scores, -float("inf"))
        position = min(input_ids.shape[1], len(self.ids) - 1)
        forced[:, self.ids[position]] = 0
        return forced


class ListStreamer(BaseStreamer):
    def __init__(self):
        self.puts = []
        self.ended = 0

    def put(self, value):
        assert value.device.type == "cpu"
        self.puts.append(value.tolist())

    def end(self):
        self.ended += 1
