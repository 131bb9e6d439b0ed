"""The methods with retrieval have names of their own, and differ in what they are named for."""

from __future__ import annotations

import hf_refspec as rs
from hf_refspec.apps.bench.methods import (
    BASELINE,
    BLEND,
    DEFAULT,
    OURS,
    PUBLISHED,
    RECYCLING,
    decoding_methods,
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


def recycling(methods) -> list[str]:
    drafters = {method.name: method.drafter for method in methods}
    sources = {name: getattr(each, "drafters", [each]) for name, each in drafters.items()}
    return [
        name
        for name, each in sources.items()
        if any(isinstance(source, rs.TokenRecycling) for source in each)
    ]


def test_the_model_s_logits_are_recycled_only_where_it_writes_freely():
    """In a replay it is forced, and they say nothing of the text."""
    names = [RECYCLING, "TokenRecycling", DEFAULT, BLEND]
    assert recycling(decoding_methods()) == names
    assert recycling(decoding_methods(recycles=False)) == []
    every = [method.name for method in decoding_methods()]
    assert every[0] == "plain generate" and set(names) < set(every)
