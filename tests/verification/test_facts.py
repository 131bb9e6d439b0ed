"""What has been found out about a model is kept at the model, and nowhere else."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from calls import PROMPT
from drafters import Noise, Prophet
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from hf_refspec.verification.facts import facts_about

OPTIONS = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}


@pytest.fixture
def model(llama) -> LlamaForCausalLM:
    """One of which something has been found out."""
    model = LlamaForCausalLM(llama.config).eval()
    model.load_state_dict(llama.state_dict())
    model.generate(PROMPT, candidate_generator=Noise(), **OPTIONS)
    assert facts_about(model)
    return model


def drafted(model) -> None:
    plain = model.generate(PROMPT, **OPTIONS)
    drafter = Prophet(plain, accuracy=1.0)
    ids = model.generate(PROMPT, candidate_generator=drafter, max_draft_tokens=4, **OPTIONS)
    assert ids.tolist() == plain.tolist()
    assert drafter.stats.mat > 1.5


def test_are_the_same_at_each_call_and_of_each_model_its_own(model, llama):
    facts = facts_about(model)
    assert facts_about(model) is facts
    assert facts_about(llama) is not facts
    facts["a fact"] = 1
    assert "a fact" not in facts_about(llama)


def test_a_copy_finds_out_for_itself(model):
    """It may be changed: another dtype, other weights, a mask that is not heeded."""
    before = dict(facts_about(model))
    twin = copy.deepcopy(model)
    assert not facts_about(twin)
    drafted(twin)
    assert facts_about(twin).keys() & before.keys()
    assert dict(facts_about(model)) == before


def test_a_pickled_model_does_not_need_this_package(model):
    pickled = pickle.dumps(model)
    assert b"hf_refspec." not in pickled
    twin = pickle.loads(pickled)
    assert not facts_about(twin)
    drafted(twin)


def test_a_saved_model_is_as_it_was(model, tmp_path):
    model.save_pretrained(tmp_path)
    assert "refspec" not in (tmp_path / "config.json").read_text()
    drafted(AutoModelForCausalLM.from_pretrained(tmp_path))


def test_a_model_is_freed():
    model = torch.nn.Linear(1, 1)
    facts_about(model)["itself"] = "not the model"
    freed = weakref.ref(model)
    del model
    gc.collect()
    assert freed() is None
