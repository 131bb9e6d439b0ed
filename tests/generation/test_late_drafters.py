"""Calls that begin before the kernels are compiled: the same ids, drafted once they are."""

import copy
import itertools

import pytest
import torch

import hf_refspec as rs
from hf_refspec.kernels.compilation import DraftingKernels, drafting_kernels
from tests.helpers.calls import GREEDY, ListStreamer, assert_lossless
from tests.helpers.own_forward import own_forward

PROMPT = torch.tensor([[5, 6, 7, 8] * 4])
# Drafted by trees, by chains (openai-gpt's trees are refused by the probe), without a cache of
# their own, and not at all.
TYPES = ["llama", "gemma2", "openai-gpt", "cpmant", "mpt", "rwkv"]


@pytest.fixture
def unloaded(monkeypatch):
    """The next call compiles the kernels after its first token."""
    monkeypatch.setattr(drafting_kernels, "compiled", False)


@pytest.fixture(params=[0, 8, None], ids=["after the first token", "in the middle", "never"])
def late(request, unloaded, monkeypatch):
    """Kernels that are ready when a call asks for them once more than this, or not at all."""
    asked, ready = itertools.count(), DraftingKernels.ready

    def ready_later(kernels, in_call=False):
        waits = request.param is None or next(asked) < request.param
        return False if waits else ready(kernels, in_call)

    monkeypatch.setattr(DraftingKernels, "ready", ready_later)
    return request.param


def drafted_as_plain(model, prompts=PROMPT):
    """The stats of a call."""
    return assert_lossless(model, rs.ReferenceCopy() | rs.TokenRecycling(), prompts)


@pytest.mark.parametrize(("kind", "rows"), [*((kind, 1) for kind in TYPES), ("llama", 3)])
def test_ids_are_those_of_plain_decoding_in_every_call(models_by_type, kind, rows, late):
    model = copy.deepcopy(models_by_type(kind))  # that no other test has probed
    prompts = torch.stack([PROMPT[0], PROMPT[0].flip(0), PROMPT[0] + 1])[:rows]
    drafts = [drafted_as_plain(model, prompts).drafted for _ in range(3)]
    if kind == "llama":
        assert (min(drafts) > 0) == (late is not None)


def test_a_late_beginning_drafts_what_an_early_one_does(fresh_llama, unloaded):
    late = drafted_as_plain(fresh_llama)
    assert drafting_kernels.compiled
    early = drafted_as_plain(fresh_llama)
    assert (late.drafted, late.accepted) == (early.drafted, early.accepted)
    assert late.drafted > 0


def test_the_first_token_waits_for_no_probe(fresh_llama):
    passes, passes_before = [], []
    own_forward(fresh_llama, lambda usual, **kwargs: passes.append(True) or usual(**kwargs))

    class Counter(ListStreamer):
        def put(self, value):
            passes_before.append(len(passes))

    drafting = {"candidate_generator": rs.ReferenceCopy(), "max_draft_tokens": 6}
    fresh_llama.generate(PROMPT, streamer=Counter(), **drafting, **GREEDY)
    assert passes_before[:2] == [0, 1]  # the prompt, the first token
    assert passes_before[2] > 2  # the probe has run


def test_references_of_another_vocabulary_are_refused_before_any_token(llama, late):
    streamer = ListStreamer()
    drafter = rs.ReferenceCopy(references=[[5, 10_000]]) | rs.TokenRecycling()
    with pytest.raises(ValueError, match="10000"):
        llama.generate(PROMPT, candidate_generator=drafter, streamer=streamer, **GREEDY)
    assert not streamer.puts
