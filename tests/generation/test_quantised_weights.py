"""Weights that torchao quantises: the same ids as plain decoding of the same quantised model."""

from __future__ import annotations

import copy

import pytest
import torch

import hf_refspec as rs
from tests.helpers.calls import assert_lossless

quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")

PROMPT = torch.tensor([[5, 6, 7, 8] * 6])
KINDS = {
    "int8 weights": quantization.Int8WeightOnlyConfig,
    "int8 weights and activations": quantization.Int8DynamicActivationInt8WeightConfig,
}


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_the_quantised_model_alone(llama, kind):
    model = copy.deepcopy(llama)
    quantization.quantize_(model, KINDS[kind]())
    assert "torchao" in type(model.model.layers[0].mlp.up_proj.weight).__module__
    for sampling in ({}, {"do_sample": True}):
        drafter = rs.ReferenceCopy() | rs.TokenRecycling()
        stats = assert_lossless(model, drafter, PROMPT, max_new_tokens=60, **sampling)
        assert stats.accepted > 0 or sampling
