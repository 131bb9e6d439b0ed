"""Random models have the shapes of real ones."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaForCausalLM

from hf_refspec.apps.bench.models import llama_config, random_model


@pytest.mark.parametrize(
    ("size", "billions"),
    [("500M", 0.495), ("1B", 1.10), ("8B", 7.24)],
)
def test_sizes_are_what_they_are_called(size, billions):
    with torch.device("meta"):
        model = LlamaForCausalLM(llama_config(size, 32000))
    assert model.num_parameters() / 1e9 == pytest.approx(billions, rel=0.01)


def test_random_models_are_the_same_each_time_and_leave_the_random_numbers_alone():
    torch.manual_seed(1)
    one, drawn = random_model("tiny", 64), torch.rand(1)
    torch.manual_seed(1)
    assert torch.rand(1) == drawn
    other = random_model("tiny", 64)
    assert torch.equal(one.lm_head.weight, other.lm_head.weight)
    assert one.dtype == torch.float32
    assert random_model("tiny", 64, dtype=torch.bfloat16).dtype == torch.bfloat16
