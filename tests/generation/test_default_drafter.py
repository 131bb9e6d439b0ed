"""`candidate_generator="auto"`: no drafter to choose, and what is learned stays at the model."""

from __future__ import annotations

import copy
import threading
from functools import partial

import pytest
import torch
from calls import PROMPT, Call
from transformers import LlamaForCausalLM

import hf_refspec as rs
from hf_refspec.generation import default_drafter as module
from hf_refspec.generation.default_drafter import default_drafter, default_sources

OPTIONS = {"max_new_tokens": 48, "do_sample": False, "eos_token_id": None}


@pytest.fixture
def model(llama):
    """One that no other test has taught anything."""
    model = LlamaForCausalLM(copy.deepcopy(llama.config)).eval()
    model.load_state_dict(llama.state_dict())
    return model


def test_ids_are_those_of_plain_decoding(model):
    plain = model.generate(PROMPT, **OPTIONS)
    for nodes in ("auto", 8, 64):
        drafted = model.generate(
            PROMPT, candidate_generator="auto", max_draft_tokens=nodes, **OPTIONS
        )
        assert drafted.tolist() == plain.tolist()
    speculate = partial(rs.speculate, max_draft_tokens=8)
    assert model.generate(PROMPT, custom_generate=speculate, **OPTIONS).tolist() == plain.tolist()


@pytest.mark.parametrize("rows", [1, 3])
def test_a_second_call_has_learned_from_the_first(model, rows):
    call = Call(model, rows)
    with default_drafter(model) as first:
        pass
    mats = []
    for _ in range(2):
        drafted = call.generate(candidate_generator="auto", max_draft_tokens=16)
        assert drafted.tolist() == call.plain.tolist()
        mats.append(first.stats.mat)
    assert mats[1] > 1.2 * mats[0]


def test_calls_in_several_threads_share_what_they_learn(model):
    plain = model.generate(PROMPT, **OPTIONS)
    drafted = []

    def call():
        ids = model.generate(PROMPT, candidate_generator="auto", max_draft_tokens=8, **OPTIONS)
        drafted.append(ids.tolist())

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert drafted == [plain.tolist()] * 4
    with default_drafter(model) as one, default_drafter(model) as other:
        assert one is not other
        contexts = [len(each.drafters[1]) for each in (one, other)]
    assert contexts[0] == contexts[1] > 0


def test_a_drafter_goes_back_when_the_call_fails(model):
    with pytest.raises(RuntimeError), default_drafter(model) as first:
        raise RuntimeError
    with default_drafter(model) as second:
        assert second is first


def test_a_copy_of_a_model_begins_anew(model):
    with default_drafter(model) as mine, default_drafter(copy.deepcopy(model)) as theirs:
        assert mine is not theirs
        assert mine.drafters[1]._table is not theirs.drafters[1]._table


def test_a_model_whose_vocabulary_changes_begins_anew(model):
    model.generate(PROMPT, candidate_generator="auto", max_draft_tokens=8, **OPTIONS)
    model.resize_token_embeddings(model.config.vocab_size + 8)
    plain = model.generate(PROMPT, **OPTIONS)
    drafted = model.generate(PROMPT, candidate_generator="auto", max_draft_tokens=8, **OPTIONS)
    assert drafted.tolist() == plain.tolist()


def test_a_small_vocabulary_will_do(model):
    small = copy.deepcopy(model)
    small.resize_token_embeddings(6)
    prompt = torch.tensor([[1, 2, 3, 4, 1, 2]])
    plain = small.generate(prompt, **OPTIONS)
    assert small.generate(prompt, candidate_generator="auto", **OPTIONS).tolist() == plain.tolist()


def test_it_copies_and_recycles():
    assert [type(source) for source in default_sources()] == [rs.ReferenceCopy, rs.TokenRecycling]
    assert module.Blend(default_sources()).observed_top_k > 0


def test_another_word_is_refused(model):
    with pytest.raises(TypeError, match=r"must be .auto., a drafter.*but is .best."):
        model.generate(PROMPT, candidate_generator="best", **OPTIONS)
