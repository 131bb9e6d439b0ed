"""Each bad input gets one clear exception before any forward pass, and nothing is left changed."""

from pathlib import Path

import pytest
import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    LlamaForCausalLM,
    StaticCache,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.generation.candidate_generator import CandidateGenerator

import hf_refspec as rs
from hf_refspec.refusals import check_prepared, why_inexact
from hf_refspec.verification.finding import Finding
from tests.helpers.architectures import small, tiny_config
from tests.helpers.calls import GREEDY, PROMPT, ListStreamer
from tests.helpers.drafters import Noise, Prophet
from tests.helpers.own_forward import own_forward
from tests.helpers.passes import passes_of


@pytest.fixture
def untouched(llama):
    """A streamer. The test fails if the model has run or anything has been streamed."""
    streamer = ListStreamer()
    with passes_of(llama) as passes:
        yield streamer
    assert not passes
    assert streamer.puts == []


class FromHiddenStates(CandidateGenerator):
    requires_model_outputs = True


REFUSED = {
    "an unknown verification": ({"verification": "trees"}, "`verification`.*'trees'"),
    "a negative budget": ({"max_draft_tokens": -1}, "`max_draft_tokens`.*-1"),
    "a huge budget": (
        {"max_draft_tokens": 10**6},
        "`max_draft_tokens` must be at most 1024, but is 1000000",
    ),
    "beam search": ({"num_beams": 3}, "`num_beams=3`: beam search .*Pass `num_beams=1`"),
    "an offloaded static cache": (
        {"cache_implementation": "offloaded_static"},
        "cache_implementation='offloaded_static'",
    ),
    "no cache": ({"use_cache": False}, "`use_cache=False`"),
    "prompt look-up beside it": (
        {"prompt_lookup_num_tokens": 3},
        "cannot be combined with `prompt_lookup_num_tokens=3`: both draft",
    ),
    "an assistant beside it": (
        {"assistant_model": torch.nn.Identity()},
        r"`assistant_model.*rs.DraftModel\(assistant\)",
    ),
    "another loop beside it": ({"custom_generate": print}, "`custom_generate="),
    "a loop of the Hub beside it": ({"custom_generate": "org/it"}, "`custom_generate='org/it'`"),
    "no row": ({"inputs": PROMPT[:0]}, "`input_ids` with no token"),
    "positions without rows": (
        {"position_ids": torch.arange(PROMPT.shape[1])},
        r"`position_ids` of shape \(9,\): pass `\(rows, length\)`",
    ),
    "padding that is no token": (
        {"inputs": PROMPT.repeat(2, 1), "pad_token_id": -1, "eos_token_id": 2},
        "`pad_token_id=-1` and `input_ids` with 2 rows",
    ),
    "token healing": ({"token_healing": True}, "`token_healing=True`"),
    "continuous batching": ({"cache_implementation": "paged"}, "cache_implementation='paged'"),
    "hidden states": (
        {"output_hidden_states": True, "return_dict_in_generate": True},
        "`output_hidden_states=True`",
    ),
    "attentions": (
        {"output_attentions": True, "return_dict_in_generate": True},
        "`output_attentions=True`",
    ),
    "beams in a generation config": (
        {"generation_config": GenerationConfig(num_beams=2, max_new_tokens=4)},
        "`num_beams=2`",
    ),
    "drafts from hidden states": (
        {"candidate_generator": FromHiddenStates()},
        "`candidate_generator` is a FromHiddenStates",
    ),
    "references outside of the vocabulary": (
        {"candidate_generator": rs.ReferenceCopy(references=[[5, 97]])},
        "97",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_is_refused(llama, untouched, case):
    options, message = REFUSED[case]
    drafter = rs.ReferenceCopy()
    options = {"inputs": PROMPT, "candidate_generator": drafter, "max_length": 40, **options}
    with pytest.raises(ValueError, match=message):
        llama.generate(streamer=untouched, **options)


@pytest.mark.parametrize(
    ("name", "value", "hint"),
    [
        *(("max_draft_tokens", value, "") for value in (2.5, "8", True)),
        ("candidate_generator", "autoo", r"but is 'autoo' \(did you mean 'auto'\?\)\."),
        *(("candidate_generator", value, "") for value in (3, rs.ReferenceCopy)),
        *(
            ("candidate_generator", name, rf"{name!r}: pass `rs\.ReferenceCopy\(\)`, not its name")
            for name in ("ReferenceCopy", "referencecopi", "reference_copy")
        ),
        (
            "candidate_generator",
            "rs.DraftModel",
            r"pass `rs\.DraftModel\(assistant\)`, not its name",
        ),
        ("candidate_generator", 7, r"of the type int\.$"),
        (
            "candidate_generator",
            [rs.ReferenceCopy()],
            r"but is of the type list: join drafters with `\|`",
        ),
        ("candidate_generator", "org/store", r"'org/store': open a datastore by `rs\.Datastore"),
        ("candidate_generator", Path("store"), r"open a datastore by `rs\.Datastore\.from_pretr"),
        ("candidate_generator", torch.nn.Linear(2, 2), r"but is of the type Linear\.$"),
    ],
)
def test_a_value_of_another_type_is_refused(llama, untouched, name, value, hint):
    options = {"candidate_generator": rs.ReferenceCopy(), name: value}
    with pytest.raises(TypeError, match=f"`{name}` must be.*{hint}"):
        llama.generate(PROMPT, max_length=40, **options)


def test_a_model_as_drafter_is_told_how_it_drafts(llama, untouched):
    remedy = r"the type LlamaForCausalLM: a model drafts as `rs\.DraftModel\(model\)`"
    with pytest.raises(TypeError, match=remedy):
        llama.generate(PROMPT, max_length=40, candidate_generator=llama)
    with pytest.raises(TypeError, match=remedy):
        rs.ReferenceCopy() | llama


def test_an_offloaded_static_cache_that_is_passed_in_is_refused(llama, untouched):
    cache = StaticCache(config=llama.config, max_cache_len=64, offloading=True)
    with pytest.raises(ValueError, match="StaticCache: its layers are offloaded"):
        llama.generate(
            PROMPT, max_length=40, past_key_values=cache, candidate_generator=rs.ReferenceCopy()
        )


def test_a_quantized_cache_is_refused():
    config = GenerationConfig(
        num_beams=1, num_return_sequences=1, use_cache=True, cache_implementation="quantized"
    )
    with pytest.raises(ValueError, match="a quantized cache"):
        check_prepared(None, PROMPT, config, {}, "candidate_generator")


def test_inputs_embeds_are_refused(llama, untouched):
    embeds = llama.get_input_embeddings()(PROMPT)
    with pytest.raises(ValueError, match=r"`inputs_embeds`, .* BLIP-2 .* or leave the drafter out"):
        llama.generate(inputs_embeds=embeds, max_length=40, candidate_generator=rs.ReferenceCopy())


def test_hidden_states_that_are_not_returned_are_not_computed():
    model, name, asked = small("llama"), "output_hidden_states", []
    own_forward(model, lambda usual, **kwargs: asked.append(kwargs.get(name)) or usual(**kwargs))
    options = {**GREEDY, name: True}
    plain = model.generate(PROMPT, **options)
    assert any(asked)  # as plain decoding does
    asked.clear()
    drafter = Prophet(plain, accuracy=0.9)
    options |= {"candidate_generator": drafter, "max_draft_tokens": 8}
    assert model.generate(PROMPT, **options).tolist() == plain.tolist()
    assert drafter.stats.mat > 1.5 and asked and not any(asked)


class Fading(LlamaForCausalLM):
    """Shifts its logits by an argument of the call, which shrinks with each step."""

    def forward(self, *args, shift=None, **kwargs):
        outputs = super().forward(*args, **kwargs)
        if shift is not None:
            outputs.logits = outputs.logits.roll(int(shift), dims=-1)
        return outputs

    def _update_model_kwargs_for_generation(self, outputs, model_kwargs, *args, **kwargs):
        model_kwargs = super()._update_model_kwargs_for_generation(
            outputs, model_kwargs, *args, **kwargs
        )
        if "shift" in model_kwargs:
            model_kwargs["shift"] = model_kwargs["shift"] - 1
        return model_kwargs


def test_an_argument_that_the_model_itself_changes_at_each_step_is_refused(llama):
    model = Fading(llama.config).eval()
    model.load_state_dict(llama.state_dict())
    options = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None}
    plain = model.generate(PROMPT, shift=20, **options)
    with pytest.raises(ValueError, match="`shift`: the `_update_model_kwargs_for_generation` of"):
        model.generate(PROMPT, shift=20, candidate_generator=Prophet(plain, 0.9), **options)
    with rs.attach(model, Prophet(plain, 0.9)) as attachment:
        assert model.generate(PROMPT, shift=20, **options).tolist() == plain.tolist()
        assert attachment.stats.tokens == 0
        model.generate(PROMPT, **options)
        assert attachment.stats.tokens == 16


def test_an_encoder_decoder_model_is_refused_before_its_encoder_runs():
    model = T5ForConditionalGeneration(tiny_config(T5Config, {}))
    model.encoder.register_forward_pre_hook(lambda *_: pytest.fail("the encoder has run"))
    with pytest.raises(ValueError, match="encoder-decoder"):
        model.generate(PROMPT, max_length=40, candidate_generator=rs.ReferenceCopy())


def test_a_refused_call_leaves_drafter_and_cache_as_they_were(llama):
    cache = DynamicCache(config=llama.config)
    drafter = Noise()
    with pytest.raises(ValueError, match="use_cache"):
        llama.generate(PROMPT, past_key_values=cache, use_cache=False, candidate_generator=drafter)
    assert cache.get_seq_length() == 0
    plain = llama.generate(PROMPT, max_new_tokens=8)
    drafted = llama.generate(
        PROMPT, max_new_tokens=8, past_key_values=cache, candidate_generator=drafter
    )
    assert drafted.tolist() == plain.tolist()


def test_the_findings_of_two_kinds_of_one_name_are_both_in_the_reason():
    findings = [("chain", Finding(False, error)) for error in (0.25, 0.5)]
    text = why_inexact(findings, 1, None).text
    assert "chain: logits are 2.5e-01" in text and "chain: logits are 5.0e-01" in text
