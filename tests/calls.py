"""Calls of `generate` for tests: prompts, comparisons, and what is passed along."""

from __future__ import annotations

import numpy as np
import torch
from architectures import VOCAB_SIZE
from drafters import Prophet, Prophets
from transformers import LogitsProcessor
from transformers.generation.streamers import BaseStreamer

PROMPT = torch.tensor([[5, 9, 12, 7, 5, 9, 33, 12, 7]])
GREEDY = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}


def assert_lossless(
    model, drafter=0.9, inputs=PROMPT, verification="auto", max_draft_tokens=8, **options
):
    """Asserts that a drafter changes no id of a call, greedy unless the options say otherwise.

    Args:
        drafter: A number is the accuracy of a `Prophet`, several are those of the rows.
        inputs: Ids, or `input_ids` and `attention_mask`.

    Returns:
        The drafter's stats.
    """
    inputs = inputs if isinstance(inputs, dict) else {"input_ids": inputs}
    options = {**inputs, **GREEDY, **options}
    torch.manual_seed(0)
    plain = model.generate(**options)
    if isinstance(drafter, float):
        single = len(inputs["input_ids"]) == 1
        drafter = Prophet(plain, drafter) if single else Prophets(inputs, plain, drafter)
    elif isinstance(drafter, (list, np.ndarray)):
        drafter = Prophets(inputs, plain, drafter)
    options |= {"verification": verification, "max_draft_tokens": max_draft_tokens}
    torch.manual_seed(0)
    drafted = model.generate(**options, candidate_generator=drafter)
    assert drafted.tolist() == plain.tolist()
    return getattr(drafter, "stats", None)


_PADDING = (0, 5, 2, 9, 0)


def padded_prompts(rows: int, length: int = 12, seed: int = 1) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask` of prompts of different lengths, padded on the left."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB_SIZE, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    for row, padding in enumerate(_PADDING[:rows]):
        ids[row, :padding] = 0
        mask[row, :padding] = 0
    return {"input_ids": ids, "attention_mask": mask}


class Call:
    """A greedy call of some rows and what plain decoding returns for it.

    Attributes:
        inputs: `input_ids` and `attention_mask`.
        options: The inputs, greedy decoding, 32 new tokens, and those given.
        plain: The ids, `(rows, 12 + 32)`.
    """

    prompt_length, new_tokens = 12, 32

    def __init__(self, model, rows: int, seed: int = 1, **options):
        self.model, self.rows = model, rows
        self.inputs = padded_prompts(rows, self.prompt_length, seed)
        self.options = {**self.inputs, **GREEDY, "max_new_tokens": self.new_tokens, **options}
        self.plain = self.generate()

    def generate(self, **kwargs):
        """Calls `generate` with these options in place of the call's own."""
        return self.model.generate(**{**self.options, **kwargs})

    def drafter(self, accuracies=0.8, branches: int = 2, seed: int = 0) -> Prophets:
        """A drafter that gets each row's text right as often as its accuracy says."""
        if not isinstance(accuracies, float):
            accuracies = accuracies[: self.rows]
        return Prophets(self.inputs, self.plain, accuracies, branches, seed)

    def assert_lossless(self, accuracies=0.8, drafter=None, max_draft_tokens=8, **options):
        """Asserts that drafts change no id of the call with these options; returns the stats."""
        drafter = drafter or self.drafter(accuracies)
        drafting = {"candidate_generator": drafter, "max_draft_tokens": max_draft_tokens}
        drafting |= {name: options.pop(name) for name in ["verification"] if name in options}
        plain = self.generate(**options) if options else self.plain
        assert self.generate(**options, **drafting).tolist() == plain.tolist()
        return drafter.stats


def up_to_end(tokens: torch.Tensor, ends) -> list[int]:
    """New tokens up to the first end of text."""
    tokens = tokens.tolist()
    places = [place for place, token in enumerate(tokens) if token in ends]
    return tokens[: places[0] + 1] if places else tokens


def prepared(model, input_ids, **kwargs):
    """The generation config and model inputs that `generate` prepares for its decoding loop."""
    taken = []

    def taking(
        model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs
    ):
        taken.extend([generation_config, model_kwargs])
        return input_ids

    model.generate(input_ids, custom_generate=taking, **kwargs)
    return taken


class Forced(LogitsProcessor):
    """Forces the model to emit a given text."""

    def __init__(self, ids):
        self.ids = ids[0]

    def __call__(self, input_ids, scores):
        forced = torch.full_like(scores, -float("inf"))
        position = min(input_ids.shape[1], len(self.ids) - 1)
        forced[:, self.ids[position]] = 0
        return forced


class Alternating(LogitsProcessor):
    """Keeps state: forbids even tokens at every second call. It holds a module, as outlines' do."""

    def __init__(self):
        self.calls = 0
        self.library = torch

    def __call__(self, input_ids, scores):
        self.calls += 1
        if self.calls % 2:
            scores[:, ::2] = -float("inf")
        return scores


class ListStreamer(BaseStreamer):
    def __init__(self):
        self.puts = []
        self.ended = 0

    def put(self, value):
        assert value.device.type == "cpu"
        self.puts.append(value.tolist())

    def end(self):
        self.ended += 1
