"""Each bad input gets one clear exception before any forward pass, and nothing is left changed."""

from __future__ import annotations

import pytest
import torch
from calls import PROMPT, ListStreamer
from drafters import Noise
from transformers import (
    AutoModelForSeq2SeqLM,
    DynamicCache,
    GenerationConfig,
    StaticCache,
    T5Config,
)
from transformers.generation.candidate_generator import CandidateGenerator

import hf_refspec as rs
from hf_refspec.generation.validation import check_request


@pytest.fixture
def untouched(llama):
    """A streamer. The test fails if the model has run or anything has been streamed."""
    passes = []
    handle = llama.register_forward_pre_hook(lambda *_: passes.append(1))
    streamer = ListStreamer()
    yield streamer
    handle.remove()
    assert not passes
    assert streamer.puts == []


class FromHiddenStates(CandidateGenerator):
    requires_model_outputs = True


REFUSED = {
    "an unknown verification": ({"verification": "trees"}, "`verification`.*'trees'"),
    "a negative budget": ({"max_draft_tokens": -1}, "`max_draft_tokens`.*-1"),
    "a streamer of two rows": (
        {"inputs": PROMPT.repeat(2, 1)},
        "`input_ids` with 2 rows cannot be combined with `streamer`",
    ),
    "beam search": ({"num_beams": 3}, "`num_beams=3`"),
    "a streamer of several sequences": (
        {"num_return_sequences": 2, "do_sample": True},
        "`input_ids` with 2 rows cannot be combined with `streamer`",
    ),
    "an offloaded static cache": (
        {"cache_implementation": "offloaded_static"},
        "cache_implementation='offloaded_static'",
    ),
    "no cache": ({"use_cache": False}, "`use_cache=False`"),
    "prompt look-up beside it": ({"prompt_lookup_num_tokens": 3}, "`prompt_lookup_num_tokens=3`"),
    "an assistant beside it": ({"assistant_model": torch.nn.Identity()}, "`assistant_model`"),
    "another loop beside it": ({"custom_generate": print}, "`custom_generate="),
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


@pytest.mark.parametrize("value", [2.5, "8", True])
def test_a_budget_that_is_no_int_is_refused(llama, untouched, value):
    with pytest.raises(TypeError, match=f"`max_draft_tokens`.*{value!r}"):
        llama.generate(
            PROMPT, max_length=40, candidate_generator=rs.ReferenceCopy(), max_draft_tokens=value
        )


@pytest.mark.parametrize("value", ["ReferenceCopy", 3, rs.ReferenceCopy, [rs.ReferenceCopy()]])
def test_a_candidate_generator_that_is_none_is_refused(llama, untouched, value):
    with pytest.raises(TypeError, match="`candidate_generator` must be"):
        llama.generate(PROMPT, max_length=40, candidate_generator=value)


def test_an_offloaded_static_cache_that_is_passed_in_is_refused(llama, untouched):
    cache = StaticCache(config=llama.config, max_cache_len=64, offloading=True)
    with pytest.raises(ValueError, match="StaticCache with `offloading=True`"):
        llama.generate(
            PROMPT, max_length=40, past_key_values=cache, candidate_generator=rs.ReferenceCopy()
        )


def test_retrieval_while_generating_refuses_a_static_cache(llama):
    config = GenerationConfig(
        num_beams=1, num_return_sequences=1, use_cache=True, cache_implementation="static"
    )
    with pytest.raises(ValueError, match="`knn_lm` cannot be combined with `cache_impl"):
        check_request(PROMPT, config, {}, "knn_lm")


def test_a_quantized_cache_is_refused():
    config = GenerationConfig(
        num_beams=1, num_return_sequences=1, use_cache=True, cache_implementation="quantized"
    )
    with pytest.raises(ValueError, match="a quantized cache"):
        check_request(PROMPT, config, {}, "candidate_generator")


def test_inputs_embeds_are_refused(llama, untouched):
    embeds = llama.get_input_embeddings()(PROMPT)
    with pytest.raises(ValueError, match="`inputs_embeds`"):
        llama.generate(inputs_embeds=embeds, max_length=40, candidate_generator=rs.ReferenceCopy())


def test_an_encoder_decoder_model_is_refused_before_its_encoder_runs():
    config = T5Config(
        vocab_size=40, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, pad_token_id=0
    )
    model = AutoModelForSeq2SeqLM.from_config(config)
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
