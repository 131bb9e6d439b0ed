"""Facts about a model are kept with the model, and nowhere else."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from calls import GREEDY, PROMPT, assert_lossless
from drafters import Noise
from transformers import AutoModelForCausalLM

from hf_refspec.verification.facts import facts_about


@pytest.fixture
def model(fresh_llama):
    """A model about which facts are known."""
    fresh_llama.generate(PROMPT, candidate_generator=Noise(), **GREEDY)
    assert facts_about(fresh_llama)
    return fresh_llama


def check(model) -> None:
    assert assert_lossless(model, 1.0, max_draft_tokens=4).mat > 1.5


def test_each_model_has_facts_of_its_own(model, llama):
    facts = facts_about(model)
    assert facts_about(model) is facts
    assert facts_about(llama) is not facts
    facts["a fact"] = 1
    assert "a fact" not in facts_about(llama)


def test_a_copy_starts_without_facts(model):
    """A copy may be changed: another dtype, other weights, a mask that is ignored."""
    before = dict(facts_about(model))
    twin = copy.deepcopy(model)
    assert not facts_about(twin)
    check(twin)
    assert facts_about(twin).keys() & before.keys()
    assert dict(facts_about(model)) == before


def test_a_pickled_model_does_not_need_this_package(model):
    pickled = pickle.dumps(model)
    assert b"hf_refspec." not in pickled
    twin = pickle.loads(pickled)
    assert not facts_about(twin)
    check(twin)


def test_a_saved_model_holds_no_facts(model, tmp_path):
    model.save_pretrained(tmp_path)
    assert "refspec" not in (tmp_path / "config.json").read_text()
    check(AutoModelForCausalLM.from_pretrained(tmp_path))


def test_a_model_is_freed():
    model = torch.nn.Linear(1, 1)
    facts_about(model)["itself"] = "not the model"
    freed = weakref.ref(model)
    del model
    gc.collect()
    assert freed() is None
