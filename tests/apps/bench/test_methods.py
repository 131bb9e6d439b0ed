"""The methods, and the random models that they are measured on."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import hf_refspec as rs
from hf_refspec.apps.bench.methods import (
    BUDGETS,
    LLMA,
    RECYCLING,
    decoding_methods,
    with_references,
)
from hf_refspec.apps.bench.models import random_model
from hf_refspec.drafting.observation import Observation


def test_the_model_s_logits_are_recycled_only_where_it_writes_freely():
    """In a replay it is forced, and they say nothing about the text."""
    assert RECYCLING in [method.name for method in decoding_methods()]
    assert not any("Recycling" in repr(each.drafter) for each in decoding_methods(recycles=False))


def test_a_datastore_adds_its_methods(tmp_path, tokenizer):
    store = rs.Datastore.build(["def f(): pass"] * 3, tokenizer, tmp_path / "s", progress=False)
    every = {method.name for method in decoding_methods()}
    added = [method.name for method in decoding_methods(store) if method.name not in every]
    assert added == ["REST's algorithm", *["DatastoreDrafts"] * len(BUDGETS)]
    compact = store.compact(tmp_path / "c", max_bytes=5000, progress=False)
    assert "REST's algorithm" not in [method.name for method in decoding_methods(compact)]


def test_llma_copies_from_the_references_of_a_question_alone():
    methods = decoding_methods()
    changed = with_references(methods, [[7, 8, 9]])
    [(before, after)] = [pair for pair in zip(methods, changed, strict=True) if pair[0] != pair[1]]
    assert before.name == LLMA
    after.drafter.begin(np.array([7, 5]), vocab_size=64)
    after.drafter.observe(Observation(np.array([7])))
    assert after.drafter.draft_chain(18).tokens.tolist() == [8, 9]


@pytest.mark.parametrize(("size", "billions"), [("500M", 0.495), ("8B", 7.24)])
def test_models_have_the_sizes_that_they_are_named_for(size, billions):
    model = random_model(size, 32000, "meta")
    assert model.num_parameters() / 1e9 == pytest.approx(billions, rel=0.01)


def test_random_models_are_the_same_each_time_and_leave_the_random_numbers_alone():
    torch.manual_seed(1)
    one, drawn = random_model("tiny", 64), torch.rand(1)
    torch.manual_seed(1)
    assert torch.rand(1) == drawn
    assert torch.equal(one.lm_head.weight, random_model("tiny", 64).lm_head.weight)
    assert random_model("tiny", 64, dtype=torch.bfloat16).dtype == torch.bfloat16
