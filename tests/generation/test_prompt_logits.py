"""What the target model expects inside the prompt, beside its own logits of all of it."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from architectures import small
from calls import assert_lossless, padded_prompts
from transformers import LlamaForCausalLM

import hf_refspec as rs
from hf_refspec import TokenRecycling
from hf_refspec.verification.prompt_logits import last_token, prompt_top_tokens, records_prompt

ALL = float("inf")


@torch.no_grad()
def recorded(model, inputs):
    """The logits after the last token, and what entered the output layer."""
    states = []
    logits = model(**inputs, logits_to_keep=last_token(states)).logits
    return states, logits


@torch.no_grad()
def prefilled(model, fraction):
    inputs = padded_prompts(2)
    states, logits = recorded(model, inputs)
    return prompt_top_tokens(model, states, logits, 4, fraction), model(**inputs).logits


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gemma2", "mistral"])
def test_they_are_the_models_own_best_tokens(models_by_type, model_type):
    model = models_by_type(model_type)
    top, logits = prefilled(model, ALL)
    assert top.tokens.shape == (2, 11, 4)  # after each of 12 tokens but the last
    assert top.choices.tolist() == logits[:, :-1].argmax(dim=-1).tolist()
    assert top.tokens[..., 0].tolist() == top.choices.tolist()


@pytest.mark.parametrize("fraction", [0.0, 0.05, 0.5, 1.0])
def test_they_are_what_a_fraction_of_the_prefill_pays_for_or_none_if_few(llama, fraction):
    head = llama.lm_head.weight.numel()
    before = (
        sum(p.numel() for p in llama.model.layers.parameters()) + llama.model.norm.weight.numel()
    )
    top, logits = prefilled(llama, fraction)
    count = 0 if top is None else top.tokens.shape[1]
    paid = min(int(fraction * 12 * before / head), 11)
    assert count == (paid if paid >= 4 else 0)
    if count:  # the last ones
        assert top.choices.tolist() == logits[:, -1 - count : -1].argmax(dim=-1).tolist()


@torch.no_grad()
def test_the_logits_are_the_same_bit_by_bit(llama):
    inputs = padded_prompts(2)
    [states], logits = recorded(llama, inputs)
    plain = llama(**inputs, logits_to_keep=1).logits
    assert torch.equal(logits, plain)
    assert states.shape == (*inputs["input_ids"].shape, llama.config.hidden_size)
    # A copy of the index, as accelerate makes one, still selects the last token.
    copied = llama(**inputs, logits_to_keep=last_token([]).clone()).logits
    torch.testing.assert_close(copied, plain)


def test_compiled_passes_get_no_index(llama):
    assert records_prompt(llama, {"logits_to_keep": 1})
    assert not records_prompt(llama, {})
    compiled = copy.copy(llama)
    compiled.forward = torch.compile(llama.forward, backend="eager")
    assert not records_prompt(compiled, {"logits_to_keep": 1})


def test_forward_passes_that_calculate_with_logits_to_keep_get_a_number(llama):
    """As models of remote code may."""

    class Calculating(LlamaForCausalLM):
        def forward(self, input_ids, logits_to_keep=0, **kwargs):
            outputs = super().forward(input_ids, **kwargs)
            outputs.logits = outputs.logits[:, outputs.logits.shape[1] - logits_to_keep :]
            return outputs

    model = Calculating(llama.config).eval()
    assert_lossless(model, TokenRecycling())


def test_a_model_whose_logits_come_from_elsewhere_is_left_alone(llama):
    inputs = padded_prompts(1)
    states, logits = recorded(llama, inputs)
    assert prompt_top_tokens(llama, states, -logits, 4, ALL) is None
    assert prompt_top_tokens(llama, [], logits, 4, ALL) is None


@pytest.mark.parametrize("change", [lambda x: 0.5 * x, lambda x: 2 * torch.tanh(x / 2)])
def test_probabilities_are_not_taken_from_before_the_logits_are_scaled_or_capped(llama, change):
    """As Granite, Cohere and Gemma 2 do: the order stays the same, not what the logits mean."""
    states, logits = recorded(llama, padded_prompts(1))
    head = llama.lm_head.weight.data.clone()
    llama.lm_head.weight.data *= 9
    with torch.no_grad():
        try:
            assert prompt_top_tokens(llama, states, 9 * logits, 4, ALL) is not None
            assert prompt_top_tokens(llama, states, change(9 * logits), 4, ALL) is None
        finally:
            llama.lm_head.weight.data = head


def test_an_output_layer_behind_a_projection_is_left_alone():
    model = small("electra", embedding_size=32, hidden_size=64, is_decoder=True)
    assert_lossless(model, "auto", padded_prompts(1))


@pytest.mark.parametrize("rows", [1, 3])
def test_each_drafter_observes_its_own_prompt(llama, rows):
    prompts, nodes = [], []

    class Listening(rs.Drafter):
        observed_top_k, prompt_fraction = 4, ALL

        def fork(self):
            return Listening()

        def begin(self, prompt_ids, vocab_size):
            self.prompt = prompt_ids

        def draft(self, budget, call):
            return rs.DraftTree.chain([5, 9])

        def observe(self, observation):
            top = observation.top_tokens, observation.top_probs
            if observation.of_prompt:
                assert observation.tokens.tolist() == self.prompt.tolist()
                prompts.append((observation.tokens, *top))
            else:
                nodes.append((observation.verified, *top))

    inputs = padded_prompts(rows)
    drafter = rs.Blend([Listening(), rs.ReferenceCopy()])
    assert_lossless(llama, drafter, inputs, max_new_tokens=6)
    assert len(prompts) == rows
    for row, (prompt_ids, tokens, probs) in enumerate(prompts):
        kept = inputs["attention_mask"][row].bool()
        assert prompt_ids.tolist() == inputs["input_ids"][row][kept].tolist()
        with torch.no_grad():
            logits = llama(torch.from_numpy(prompt_ids)[None]).logits[0, :-1]
        assert tokens[:, 0].tolist() == logits.argmax(dim=-1).tolist()
        assert tokens.shape == probs.shape == (len(prompt_ids) - 1, 4)
    for verified, tokens, probs in nodes:
        assert tokens.shape == probs.shape == (1 + len(verified), 4)
        assert tokens.dtype == np.int32 and probs.dtype == np.float32
    assert len(nodes) > rows
