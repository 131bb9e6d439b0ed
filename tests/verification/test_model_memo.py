"""Findings about a model are kept beside it, for as long as it lives."""

import copy
import gc
import pickle
import weakref
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from transformers import AutoModelForCausalLM

import hf_refspec as rs
from hf_refspec.verification.model_memo import memo_of
from tests.helpers.calls import GREEDY, PROMPT, assert_lossless
from tests.helpers.drafters import Noise


@pytest.fixture
def model(fresh_llama):
    """A model about which something is known."""
    fresh_llama.generate(PROMPT, candidate_generator=Noise(), **GREEDY)
    assert memo_of(fresh_llama)
    return fresh_llama


def test_each_model_has_a_memo_of_its_own(model, llama):
    memo = memo_of(model)
    assert memo_of(model) is memo
    assert memo_of(llama) is not memo
    memo["a fact"] = 1
    assert "a fact" not in memo_of(llama)


def pickled(model):
    content = pickle.dumps(model)
    assert b"hf_refspec." not in content  # it may be opened without this package
    return pickle.loads(content)


def saved(model):
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        assert "refspec" not in (Path(folder) / "config.json").read_text()
        return AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("twin_of", [copy.deepcopy, pickled, saved])
def test_a_twin_starts_with_an_empty_memo(model, twin_of):
    """It may be changed: another dtype, other weights, a mask that is ignored."""
    before = dict(memo_of(model))
    twin = twin_of(model)
    assert not memo_of(twin)
    assert assert_lossless(twin, 1.0, max_draft_tokens=4).mat > 1.5
    assert memo_of(twin).keys() & before.keys()
    assert dict(memo_of(model)) == before


@pytest.mark.parametrize("drafter", ["auto", "named"])
def test_a_call_leaves_no_trace_in_the_model(fresh_llama, drafter):
    def attributes():
        return [(name, vars(module).keys()) for name, module in fresh_llama.named_modules()]

    before, content = attributes(), pickle.dumps(fresh_llama)
    generator = drafter if drafter == "auto" else rs.ReferenceCopy() | rs.TokenRecycling()
    fresh_llama.generate(PROMPT, candidate_generator=generator, **GREEDY)
    assert attributes() == before and pickle.dumps(fresh_llama) == content


@pytest.mark.parametrize("drafter", ["auto", Noise()])
def test_a_model_that_was_drafted_for_is_freed(llama, drafter):
    model = copy.deepcopy(llama)
    model.generate(PROMPT, candidate_generator=drafter, **GREEDY)
    freed = weakref.ref(model)
    del model
    gc.collect()
    assert freed() is None


def test_a_model_is_freed():
    model = torch.nn.Linear(1, 1)
    memo_of(model)["itself"] = "not the model"
    freed = weakref.ref(model)
    del model
    gc.collect()
    assert freed() is None
