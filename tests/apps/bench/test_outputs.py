"""Outputs are compared, and the distance of two logits is counted in steps of rounding."""

from __future__ import annotations

import pytest
import torch

from hf_refspec.apps.bench.outputs import Output, rounding_steps


@pytest.mark.parametrize(
    ("one", "other", "places"),
    [([1, 2, 3], [1, 2, 3], []), ([1, 5, 3], [1, 2, 4], [1, 2]), ([1], [1, 2, 3], [1, 2])],
)
def test_differences_are_the_places_with_other_tokens_or_with_none(one, other, places):
    assert Output(one).differences(Output(other)) == places
    assert Output(other).differences(Output(one)) == places


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("logit", [-17.25, 1.0, 0.75])
def test_steps_are_those_between_neighbouring_numbers_of_the_type(dtype, logit):
    one = other = torch.tensor(logit, dtype=dtype)
    for steps in range(4):
        assert rounding_steps(float(one), float(other), dtype) == steps
        assert rounding_steps(float(other), float(one), dtype) == steps
        other = torch.nextafter(other, torch.tensor(torch.inf, dtype=dtype).copysign(one))
