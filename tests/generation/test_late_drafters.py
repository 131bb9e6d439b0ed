"""Calls that begin before the kernels are loaded: the same ids, drafted once they are."""

from __future__ import annotations

import copy

import pytest
import torch
from calls import GREEDY, ListStreamer

import hf_refspec as rs
from hf_refspec.drafting.compilation import DraftingKernels, drafting_kernels

PROMPT = torch.tensor([[5, 6, 7, 8] * 4])
OPTIONS = {"max_new_tokens": 30, **GREEDY}
# Drafted by trees, by chains (openai-gpt's trees are refused by the probe), without a cache of
# their own, and not at all.
TYPES = ["llama", "gemma2", "openai-gpt", "cpmant", "mpt", "rwkv"]


@pytest.fixture(params=[True, False], ids=["loaded late", "never loaded"])
def late(request, monkeypatch):
    """Kernels that are loaded after the first token of the next call, or not at all."""
    monkeypatch.setattr(drafting_kernels, "loaded", False)
    if not request.param:
        monkeypatch.setattr(DraftingKernels, "ready", lambda self: False)


def drafted(model, prompt=PROMPT, **options):
    drafter = rs.ReferenceCopy() | rs.TokenRecycling()
    options = {**OPTIONS, "max_draft_tokens": 6, **options}
    ids = model.generate(prompt, candidate_generator=drafter, **options)
    return ids.tolist(), drafter


@pytest.mark.parametrize("kind", TYPES)
def test_ids_are_those_of_plain_decoding_in_every_call(models_by_type, kind, late):
    model = copy.deepcopy(models_by_type(kind))  # that no other test has probed
    plain = model.generate(PROMPT, **OPTIONS).tolist()
    for _ in range(3):
        assert drafted(model)[0] == plain


def test_several_rows_have_the_same_ids(models_by_type, late):
    model = copy.deepcopy(models_by_type("llama"))
    prompts = torch.stack([PROMPT[0], PROMPT[0].flip(0), PROMPT[0] + 1])
    plain = model.generate(prompts, **OPTIONS).tolist()
    assert drafted(model, prompts)[0] == plain


def test_a_late_beginning_drafts_what_an_early_one_does(models_by_type, monkeypatch):
    model = copy.deepcopy(models_by_type("llama"))
    monkeypatch.setattr(drafting_kernels, "loaded", False)
    late = drafted(model)[1].stats
    assert drafting_kernels.loaded
    early = drafted(model)[1].stats
    assert (late.drafted, late.accepted) == (early.drafted, early.accepted)
    assert late.drafted > 0


def test_a_beginning_in_the_middle_of_a_call_has_the_same_ids(models_by_type, monkeypatch):
    model = copy.deepcopy(models_by_type("llama"))
    plain = model.generate(PROMPT, **OPTIONS).tolist()
    asked = []

    def ready(kernels):
        asked.append(True)
        kernels.loaded = len(asked) > 8
        return kernels.loaded

    monkeypatch.setattr(drafting_kernels, "loaded", False)
    monkeypatch.setattr(DraftingKernels, "ready", ready)
    ids, drafter = drafted(model)
    assert ids == plain
    assert drafter.stats.drafted > 0 and drafter.stats.forward_passes > 8


def test_the_first_token_waits_for_no_probe(models_by_type):
    model, passes, passes_before = copy.deepcopy(models_by_type("llama")), [], []
    model.register_forward_hook(lambda *_: passes.append(True))

    class Counter(ListStreamer):
        def put(self, value):
            passes_before.append(len(passes))

    drafted(model, streamer=Counter())
    assert passes_before[:2] == [0, 1]  # the prompt, the first token
    assert passes_before[2] > 2  # the probe has run


def test_references_of_another_vocabulary_are_refused_before_any_token(models_by_type, late):
    model, streamer = models_by_type("llama"), ListStreamer()
    drafter = rs.ReferenceCopy(references=[[5, 10_000]]) | rs.TokenRecycling()
    with pytest.raises(ValueError, match="10000"):
        model.generate(PROMPT, candidate_generator=drafter, streamer=streamer, **OPTIONS)
    assert not streamer.puts
