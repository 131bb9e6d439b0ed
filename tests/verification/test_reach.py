"""Drafts end before a length at which attention may change, and go on where a probe crosses it."""

from __future__ import annotations

import pytest
import torch
from architectures import VOCAB_SIZE, WINDOW, small
from calls import GREEDY
from drafters import Noise, Prophet

OPTIONS = {**GREEDY, "max_new_tokens": 40}


@pytest.fixture
def mistral():
    return small("mistral")


class Placed(Prophet):
    """Records where in the text drafts were accepted."""

    def begin(self, prompt_ids, vocab_size):
        super().begin(prompt_ids, vocab_size)
        self.accepted_at = []  # lengths of the text before an accepted token
        self.passes_at = []

    def observe(self, observation):
        self.passes_at.append(self.position)
        self.accepted_at += range(self.position, self.position + len(observation.tokens) - 1)
        super().observe(observation)


def random_prompt(length: int) -> torch.Tensor:
    return torch.randint(3, VOCAB_SIZE, (1, length), generator=torch.Generator().manual_seed(1))


def placed(model, prompt_length: int, accuracy: float = 0.9, plain=None) -> Placed:
    prompt = random_prompt(prompt_length)
    plain = model.generate(prompt, **OPTIONS) if plain is None else plain
    drafter = Placed(plain, accuracy, branches=0)
    drafted = model.generate(prompt, candidate_generator=drafter, max_draft_tokens=4, **OPTIONS)
    assert drafted.tolist() == plain.tolist()
    return drafter


def test_drafts_end_before_a_window_that_they_would_see_past():
    """Moshi's mask shows more than its window to several tokens at once."""
    model = small("moshi")
    drafter = placed(model, 5)
    assert len(drafter.accepted_at) > 3
    assert max(drafter.accepted_at) < WINDOW
    assert placed(model, 20).accepted_at == []


@pytest.mark.parametrize("prompt_length", [5, 20])
def test_drafts_go_on_across_a_window_that_a_chain_crosses_exactly(mistral, prompt_length):
    drafter = placed(mistral, prompt_length)
    past = [place for place in drafter.passes_at if place >= WINDOW]
    assert (45 - max(WINDOW, prompt_length)) / len(past) > 1.5
    assert max(drafter.accepted_at) > 2 * WINDOW
    if prompt_length < WINDOW:
        assert min(drafter.accepted_at) < WINDOW - 2


def test_each_side_of_a_boundary_is_probed_once(mistral):
    passes = []
    mistral.register_forward_pre_hook(lambda *_: passes.append(1))

    def probing_passes(prompt_length: int, new_tokens: int, nodes: int = 4) -> int:
        passes.clear()
        options = {**OPTIONS, "max_new_tokens": new_tokens, "candidate_generator": (n := Noise())}
        mistral.generate(random_prompt(prompt_length), max_draft_tokens=nodes, **options)
        return len(passes) - n.stats.forward_passes

    assert probing_passes(5, 6, nodes=0) == 0
    assert probing_passes(5, 6) > 0
    assert probing_passes(5, 6) == 0
    assert probing_passes(WINDOW, 6) > 0
    assert probing_passes(5, 30) == 0


def test_drafts_end_where_passes_differ_only_past_a_boundary(mistral):
    """Exact on short texts: as if a mask for several tokens forgot the window."""
    plain = mistral.generate(random_prompt(5), **OPTIONS)

    def disturb(model, args, kwargs, outputs):
        cache, tokens = outputs.past_key_values, outputs.logits.shape[1]
        length = 0 if cache is None else cache.get_seq_length()
        if tokens > 1 and length > tokens and length > WINDOW:
            outputs.logits += torch.linspace(0, 3, outputs.logits.shape[-1])
        return outputs

    mistral.register_forward_hook(disturb, with_kwargs=True)
    drafter = placed(mistral, 5, accuracy=1.0, plain=plain)
    assert len(drafter.accepted_at) > 3
    assert max(drafter.accepted_at) < WINDOW
