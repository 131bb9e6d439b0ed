"""Drafts end before a length at which attention may change, and go on where a probe crosses it."""

from __future__ import annotations

import pytest
import torch
from architectures import VOCAB_SIZE
from drafters import Noise, Prophet
from transformers import AutoConfig, AutoModelForCausalLM

OPTIONS = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
WINDOW = 16
SMALL = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.25,
    "pad_token_id": 0,
}


def small(model_type: str, **config):
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**SMALL, **config})
    return AutoModelForCausalLM.from_config(config).eval()


class Placed(Prophet):
    """Knows where in the text drafts were accepted."""

    def begin(self, prompt_ids, vocab_size):
        super().begin(prompt_ids, vocab_size)
        self.accepted_at = []  # lengths of the text before an accepted token
        self.passes_at = []

    def observe(self, observation):
        self.passes_at.append(self.position)
        self.accepted_at += range(self.position, self.position + len(observation.tokens) - 1)
        super().observe(observation)


def placed(model, prompt) -> Placed:
    options = {**OPTIONS, "max_new_tokens": 40}
    plain = model.generate(prompt, **options)
    drafter = Placed(plain, accuracy=0.9, branches=0)
    drafted = model.generate(prompt, candidate_generator=drafter, max_draft_tokens=4, **options)
    assert drafted.tolist() == plain.tolist()
    return drafter


def random_prompt(length: int) -> torch.Tensor:
    return torch.randint(3, VOCAB_SIZE, (1, length), generator=torch.Generator().manual_seed(1))


def test_a_window_that_drafts_would_see_past_ends_them():
    """Moshi's mask shows several tokens at once more than its window."""
    model = small("moshi", num_key_value_heads=4, head_dim=8, ffn_dim=48, sliding_window=WINDOW)
    drafter = placed(model, random_prompt(5))
    assert len(drafter.accepted_at) > 3
    assert max(drafter.accepted_at) < WINDOW
    assert placed(model, random_prompt(20)).accepted_at == []


@pytest.mark.parametrize("prompt_length", [5, 20])
def test_a_window_that_a_chain_crosses_exactly_does_not(prompt_length):
    model = small("mistral", num_key_value_heads=2, sliding_window=WINDOW)
    drafter = placed(model, random_prompt(prompt_length))
    past = [place for place in drafter.passes_at if place >= WINDOW]
    assert (45 - max(WINDOW, prompt_length)) / len(past) > 1.5
    assert max(drafter.accepted_at) > 2 * WINDOW
    if prompt_length < WINDOW:
        assert min(drafter.accepted_at) < WINDOW - 2


def test_what_is_past_a_boundary_is_asked_once_a_text_is_there():
    model = small("mistral", num_key_value_heads=2, sliding_window=WINDOW)
    passes = []
    model.register_forward_pre_hook(lambda *_: passes.append(1))

    def probing_passes(prompt_length: int, new_tokens: int) -> int:
        passes.clear()
        options = {**OPTIONS, "max_new_tokens": new_tokens, "candidate_generator": (n := Noise())}
        model.generate(random_prompt(prompt_length), max_draft_tokens=4, **options)
        return len(passes) - n.stats.forward_passes

    assert probing_passes(5, 6) > 0
    assert probing_passes(5, 6) == 0
    assert probing_passes(WINDOW, 6) > 0
    assert probing_passes(5, 30) == 0


def test_a_pass_that_differs_only_past_a_boundary_is_found_out():
    """Exact on short texts: as if a mask for several tokens forgot the window."""
    options = {**OPTIONS, "max_new_tokens": 40}
    model = small("mistral", num_key_value_heads=2, sliding_window=WINDOW)
    plain = model.generate(random_prompt(5), **options)

    def disturb(model, args, kwargs, outputs):
        cache, tokens = outputs.past_key_values, outputs.logits.shape[1]
        length = 0 if cache is None else cache.get_seq_length()
        if tokens > 1 and length > tokens and length > WINDOW:
            outputs.logits += torch.linspace(0, 3, outputs.logits.shape[-1])
        return outputs

    model.register_forward_hook(disturb, with_kwargs=True)
    drafter = Placed(plain, accuracy=1.0, branches=0)
    options |= {"candidate_generator": drafter, "max_draft_tokens": 4}
    assert model.generate(random_prompt(5), **options).tolist() == plain.tolist()
    assert len(drafter.accepted_at) > 3
    assert max(drafter.accepted_at) < WINDOW
