"""`candidate_generator="auto"`: the default drafter, which learns and stays with the model."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

import hf_refspec as rs
from hf_refspec.drafting.calls import default_drafters
from hf_refspec.verification.model_memo import memo_of
from tests.helpers.calls import GREEDY, PROMPT, Call, assert_lossless
from tests.helpers.drafters import Noise

OPTIONS = {**GREEDY, "max_new_tokens": 48}


@pytest.fixture
def model(fresh_llama):
    return fresh_llama


def pool_of(model):
    return default_drafters(memo_of(model), model.config.vocab_size)


def test_ids_are_those_of_plain_decoding(model):
    for nodes in ("auto", 8, 64):
        assert_lossless(model, "auto", max_draft_tokens=nodes, max_new_tokens=48)
    plain = model.generate(PROMPT, **OPTIONS)
    speculate = partial(rs.speculate, max_draft_tokens=8)
    assert model.generate(PROMPT, custom_generate=speculate, **OPTIONS).tolist() == plain.tolist()


@pytest.mark.parametrize("rows", [1, 3])
def test_a_second_call_has_learned_from_the_first(model, rows):
    call = Call(model, rows)
    with pool_of(model).drafter() as first:
        pass
    mats = []
    for _ in range(2):
        call.assert_lossless("auto", max_draft_tokens=16)
        mats.append(first.stats.mat)
    assert mats[1] > 1.2 * mats[0]


@pytest.mark.parametrize(
    "blended",
    [lambda other: "auto" | other, lambda other: other | "auto", lambda o: rs.Blend([o, "auto"])],
)
def test_auto_in_a_blend_drafts_and_learns_as_auto_alone(model, blended):
    drafter, call = blended(Noise()), Call(model, 1)
    first, second = (
        call.assert_lossless(each, max_draft_tokens=16).mat for each in (drafter, blended(Noise()))
    )
    names = {type(source).__name__ for source in drafter.sources}
    assert names == {"ReferenceCopy", "TokenRecycling", "SiblingCopy", "Noise"}
    assert second > 1.2 * first
    pool = pool_of(model)
    with pool.drafter() as default, rs.attach(model, blended(Noise())) as attachment:
        learned = len(default.sources[1])
        model.generate(PROMPT, **OPTIONS)
        assert attachment.stats.tokens == 48 and len(default.sources[1]) > learned > 0


def test_calls_in_several_threads_share_what_they_learn(model):
    plain = model.generate(PROMPT, **OPTIONS)
    options = {"candidate_generator": "auto", "max_draft_tokens": 8, **OPTIONS}
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(model.generate, PROMPT, **options) for _ in range(4)]
    assert [call.result().tolist() for call in calls] == [plain.tolist()] * 4
    with pool_of(model).drafter() as one, pool_of(model).drafter() as other:
        assert one is not other
        contexts = [len(each.sources[1]) for each in (one, other)]
    assert contexts[0] == contexts[1] > 0


def test_a_drafter_goes_back_when_the_call_fails(model):
    with pytest.raises(RuntimeError), pool_of(model).drafter() as first:
        raise RuntimeError
    with pool_of(model).drafter() as second:
        assert second is first


@pytest.mark.parametrize("vocab_size", [105, 6])
def test_a_model_whose_vocabulary_changes_begins_anew(model, vocab_size):
    for size in (97, vocab_size):
        model.resize_token_embeddings(size)
        assert_lossless(model, "auto", torch.tensor([[1, 2, 3, 4, 1, 2]]))
