"""Random models have the shapes of real ones."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_refspec.bench.models import check_device, load_model, random_model, shape_of


@pytest.mark.parametrize(
    ("size", "billions"),
    [("500M", 0.495), ("1B", 1.10), ("8B", 7.24), ("7B", 7.34), ("250M", 0.35), ("13.5B", 13.86)],
)
def test_sizes_are_what_they_are_called(size, billions):
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(vocab_size=32000, **shape_of(size)))
    assert model.num_parameters() / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize("size", ["8", "b8", "8 B", "-1B", "0B", "10M parameters", "0.1M"])
def test_what_is_no_size_is_refused(size):
    with pytest.raises(ValueError, match=f"--random-model {size} is no size: name one of tiny"):
        shape_of(size)


def test_a_model_that_is_not_there_is_named():
    with pytest.raises(ValueError, match="--model no/model/here cannot be loaded"):
        load_model("no/model/here", "cpu", torch.float32)


def test_random_models_are_the_same_each_time_and_leave_the_random_numbers_alone():
    torch.manual_seed(1)
    one, drawn = random_model("tiny", 64), torch.rand(1)
    torch.manual_seed(1)
    assert torch.rand(1) == drawn
    other = random_model("tiny", 64)
    assert torch.equal(one.lm_head.weight, other.lm_head.weight)
    assert one.dtype == torch.float32
    assert random_model("tiny", 64, dtype=torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused():
    check_device("cpu")
    with pytest.raises(ValueError, match=r"'cuda'.*no GPU.*--device cpu"):
        check_device("cuda")
