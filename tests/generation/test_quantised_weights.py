"""Weights that torchao quantises: the same ids as plain decoding of the same quantised model."""

import copy

import pytest
import torch

import hf_refspec as rs
from tests.helpers.calls import assert_lossless

quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")

PROMPT = torch.tensor([[5, 6, 7, 8] * 6])


def test_ids_of_int8_weights_are_those_of_the_quantised_model_alone(llama):
    model = copy.deepcopy(llama)
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    assert "torchao" in type(model.model.layers[0].mlp.up_proj.weight).__module__
    for sampling in ({}, {"do_sample": True}):
        drafter = rs.ReferenceCopy() | rs.TokenRecycling()
        stats = assert_lossless(model, drafter, PROMPT, max_new_tokens=60, **sampling)
        assert stats.accepted > 0 or sampling


def test_int8_activations_are_decoded_plainly(llama):
    model = copy.deepcopy(llama)
    quantization.quantize_(model, quantization.Int8DynamicActivationInt8WeightConfig())
    for sampling in ({}, {}, {"do_sample": True}):  # no later call tries another verifier
        stats = assert_lossless(model, rs.ReferenceCopy(), PROMPT, max_new_tokens=60, **sampling)
        assert stats.drafted == 0
        assert stats.reason.startswith("its quantised products")
