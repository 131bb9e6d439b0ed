"""The methods with retrieval have names of their own, and differ in what they are named for."""

from __future__ import annotations

from hf_refspec.bench.methods import (
    BASELINE,
    OURS,
    PUBLISHED,
    retrieving_methods,
    speculations,
    transformers_methods,
)
from hf_refspec.ralm.options import Speculation


def test_every_method_has_a_name_of_its_own_and_the_baseline_is_first():
    assert list(speculations(ablate=False)) == [BASELINE, PUBLISHED, OURS]
    settings = speculations(ablate=True)
    assert len(settings) == 3 + 7 + 17
    baseline, *_ = methods = retrieving_methods(settings, custom_generate="x")
    assert baseline.kwargs == {"custom_generate": "x", "speculation": None}
    names = [method.name for method in [*methods, *transformers_methods()]]
    assert len(set(names)) == len(names)


def test_fixed_strides_differ_from_ours_in_the_stride_alone():
    settings = speculations(ablate=True)
    assert settings["stride 3, asynchronous"] == Speculation(stride=3)
    assert settings["stride 8"] == Speculation(stride=8, asynchronous=False)
    assert settings["ours, ps"] == Speculation.parse("ps")
