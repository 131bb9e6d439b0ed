"""Drafts stay where plain decoding of the accepted tokens is the same computation."""

from __future__ import annotations

import pytest
import torch
from calls import PROMPT
from drafters import Noise, Prophet
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from hf_refspec.verification.positions import PositionLimits

SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.25,
    "pad_token_id": 0,
}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 4,
    "long_factor": [3.0] * 4,
    "factor": 4.0,
    "rope_theta": 10_000.0,
    "original_max_position_embeddings": 32,
}


def build(model_type: str, **config):
    """A new one for each text: the frequencies are state of the model."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**SMALL, **config})
    return AutoModelForCausalLM.from_config(config).eval()


SCALED = {
    "dynamic llama": ("llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": 32}),
    "longrope llama": ("llama", {"rope_parameters": LONG, "max_position_embeddings": 128}),
    "longrope phi3": (
        "phi3",
        {
            "rope_parameters": LONG,
            "max_position_embeddings": 128,
            "original_max_position_embeddings": 32,
        },
    ),
}


@pytest.mark.parametrize("case", SCALED)
def test_frequencies_that_depend_on_the_length_change_as_in_plain_decoding(case):
    model_type, config = SCALED[case]
    options = {"max_new_tokens": 50, "do_sample": False, "eos_token_id": None}
    plain = build(model_type, **config).generate(PROMPT, **options)
    drafter = Prophet(plain, accuracy=0.9)
    model = build(model_type, **config)
    drafted = model.generate(PROMPT, candidate_generator=drafter, **options)
    assert drafted.tolist() == plain.tolist()
    assert drafter.stats.mat > 1.3


@pytest.mark.parametrize("case", SCALED)
def test_a_probe_leaves_the_frequencies_of_the_longest_text_before(case):
    """Plain decoding goes on with them."""
    model_type, config = SCALED[case]
    options = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
    texts = []
    for drafter in (None, Noise()):
        model = build(model_type, **config)
        long = torch.cat([PROMPT] * 5, dim=-1)
        model.generate(long, **options)
        texts.append(model.generate(long[:, :34], candidate_generator=drafter, **options).tolist())
    assert texts[0] == texts[1]


@pytest.mark.parametrize("padding", [1, 3, 9])
def test_a_cache_that_begins_anew_by_length_does_so_behind_padding_too(padding):
    """Phi-3 counts the padding: its cache goes before its frequencies change."""
    model_type, config = SCALED["longrope phi3"]
    options = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None}
    generator = torch.Generator().manual_seed(padding)
    for _ in range(5):
        ids = torch.randint(3, 97, (1, padding + 17), generator=generator)
        ids[:, :padding] = 0
        options["attention_mask"] = (ids != 0).long()
        plain = build(model_type, **config).generate(ids, **options)
        model = build(model_type, **config)
        drafted = model.generate(ids, candidate_generator=Prophet(plain, accuracy=0.9), **options)
        assert drafted.tolist() == plain.tolist()


def test_drafts_stay_within_learned_positions(models_by_type):
    """GPT-2 has 512 positions; a draft past them would index outside of the table."""
    model = models_by_type("gpt2")
    prompt = torch.randint(3, 97, (1, 490), generator=torch.Generator().manual_seed(0))
    options = {"max_length": 512, "do_sample": False, "eos_token_id": None}
    plain = model.generate(prompt, **options)
    drafting = {"candidate_generator": Prophet(plain, 1.0), "max_draft_tokens": 8}
    drafted = model.generate(prompt, **drafting, **options)
    assert drafted.tolist() == plain.tolist()
    # An end of text keeps plain decoding within the table although max_length does not.
    options = {"max_length": 600, "do_sample": False, "eos_token_id": int(plain[0, 510])}
    plain = model.generate(prompt, **options)
    drafting["candidate_generator"] = Noise()
    drafted = model.generate(prompt, **drafting, **options)
    assert drafted.tolist() == plain.tolist()


@pytest.mark.parametrize("case", ["given cache", "given positions", "padding"])
def test_it_is_the_position_that_counts_not_the_length(models_by_type, case):
    """GPT-2 has a table of 512 positions; an index past its end would fail."""
    model = models_by_type("gpt2")
    options = {"max_new_tokens": 14, "do_sample": False, "eos_token_id": None}
    long = torch.randint(3, 97, (1, 497), generator=torch.Generator().manual_seed(0))

    def generate(**kwargs):
        if case == "given cache":
            cache = DynamicCache(config=model.config)
            with torch.no_grad():
                model(long[:, :495], past_key_values=cache)
            mask = torch.ones_like(long)
            return model.generate(
                long[:, 495:], past_key_values=cache, attention_mask=mask, **options, **kwargs
            )
        if case == "given positions":
            positions = torch.arange(490, 490 + PROMPT.shape[1])[None]
            return model.generate(PROMPT, position_ids=positions, **options, **kwargs)
        padded = torch.cat([torch.zeros((1, 23), dtype=torch.long), long], dim=-1)
        mask = (padded != 0).long()
        return model.generate(padded, attention_mask=mask, **options, **kwargs)

    plain = generate()
    assert generate(candidate_generator=Noise()).tolist() == plain.tolist()
    assert generate(candidate_generator=Prophet(plain, 1.0)).tolist() == plain.tolist()


def test_furthest_position():
    llama = AutoConfig.for_model("llama", **SMALL, max_position_embeddings=100)
    assert PositionLimits.of(llama).furthest(50) == 99
    assert PositionLimits.of(llama).furthest(100) is None  # past the table already
    dynamic = AutoConfig.for_model(
        "llama", **SMALL, max_position_embeddings=100, rope_parameters=DYNAMIC
    )
    assert PositionLimits.of(dynamic).furthest(50) == 99
    assert PositionLimits.of(dynamic).furthest(120) == 120
    long = AutoConfig.for_model("llama", **SMALL, max_position_embeddings=100, rope_parameters=LONG)
    assert PositionLimits.of(long).furthest(20) == 31
    assert PositionLimits.of(long).furthest(32) == 32
    assert PositionLimits.of(long).furthest(33) == 99
