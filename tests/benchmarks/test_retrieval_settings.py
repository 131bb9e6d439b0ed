"""Methods that retrieve have names of their own, and are compared with each other alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from retrieval_settings import (
    BASELINE,
    OURS,
    PUBLISHED,
    RetrievalBench,
    retrieving_methods,
    speculations,
)

from hf_refspec.apps.bench.measure import IdsDifferError
from hf_refspec.apps.bench.methods import transformers_methods
from hf_refspec.ralm.options import Speculation

PROMPT = [5, 6, 7, 8] * 3


def test_every_setting_has_a_name_of_its_own_and_the_baseline_is_first():
    assert list(speculations(ablate=False)) == [BASELINE, PUBLISHED, OURS]
    settings = speculations(ablate=True)
    assert len(settings) == 3 + 7 + 2 + 8 + 9
    baseline, *_ = retrieving_methods(settings, custom_generate="x")
    assert baseline.kwargs == {"custom_generate": "x", "speculation": None}
    assert settings["ours, stride 3"] == Speculation(stride=3)
    fixed = replace(Speculation.published("p"), stride=8)
    assert settings["as published, p, stride 8"] == fixed
    assert settings["as published, p, prefetch 256"] == replace(
        Speculation.published("p"), prefetch=256
    )
    assert settings["ours, ps"] == Speculation.parse("ps")


def scripted(answers: dict[str, list[list[int]]], passages: dict[str, list[int]] | None = None):
    """Methods whose `generate` returns what is prescribed for each of them, call by call."""
    called = []

    def method(name: str, speculation):
        left = iter(answers.get(name, answers["else"]))

        def generate(model, input_ids, speculation=None, retrieval_stats=None, **kwargs):
            called.append(name)
            model(input_ids)
            retrieval_stats.strides += [2, 3]
            retrieval_stats.waiting_seconds = 0.25
            retrieval_stats.best_ids += (passages or {}).get(name, [3, 5])
            return torch.cat([input_ids, torch.tensor([next(left)])], dim=1)

        [method] = retrieving_methods({name: speculation}, custom_generate=generate)
        return method

    return [method(*each) for each in speculations(ablate=False).items()], called


@pytest.fixture
def exact(byte_llama, tokenizer) -> RetrievalBench:
    return RetrievalBench(byte_llama, tokenizer, list, False, 3)


def test_samples_have_what_was_retrieved(exact):
    methods, called = scripted({"else": [[1, 2, 3]]})
    entry, ids = exact.measure("a", [PROMPT], None, methods)
    assert ids == [1, 2, 3]
    names = list(speculations(ablate=False))
    assert [each["method"] for each in entry["samples"]] == names
    assert sorted(called) == sorted(names)
    assert all(each["tokens"] == 3 and each["other_tokens"] == 0 for each in entry["samples"])
    for sample in entry["samples"]:
        figures = sample["figures"]
        assert figures["mean stride"] == 2.5
        seconds = sample["prefill_seconds"] + sample["decoding_seconds"]
        assert figures["R, s"] == 0.25 and figures["G, s"] == pytest.approx(seconds - 0.25)


def test_a_model_that_retrieves_nothing_may_return_other_ids(exact):
    methods = [*scripted({"else": [[1, 2]]})[0], *transformers_methods()]
    entry, _ = exact.measure("question a", [PROMPT], None, methods)
    assert [each["tokens"] for each in entry["samples"]] == [2, 2, 2, 3, 3]
    assert [each["other_tokens"] for each in entry["samples"]] == [0, 0, 0, None, None]


def test_other_passages_are_an_error_in_float32(exact):
    methods, _ = scripted({"else": [[1]]}, {OURS: [3, 4]})
    with pytest.raises(IdsDifferError, match=r"ours, psa retrieved other passages"):
        exact.measure("question a", [PROMPT], None, methods)
