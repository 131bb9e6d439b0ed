"""What the page of limits says of models and calls is what happens."""

import re
from pathlib import Path

import pytest
import torch
import transformers
from transformers import GenerationMixin, StaticCache

import hf_refspec as rs
from hf_refspec import DraftTree
from tests.helpers.architectures import CHAIN, MODEL_TYPES, PLAIN, small
from tests.helpers.calls import GREEDY, RANDOM_PROMPT, Call
from tests.helpers.drafters import Fixed, Prophet

PAGE = (Path(__file__).parents[2] / "docs" / "limits.md").read_text()


def names(begin: str) -> str:
    """The part of the page that begins so, without what model types are written without."""
    return re.sub(r"[-_\s]", "", re.split(r"\n(?=\S|    - )", PAGE[PAGE.index(begin) :])[0]).lower()


@pytest.mark.parametrize("reason", sorted({*PLAIN.values()}))
def test_it_names_the_types_that_decode_plainly_for_a_reason_and_no_others(reason):
    words = {*re.split("[,;:.()]", names(f"*{reason}*"))}
    types = {each: each.replace("_", "").replace("-", "") for each in MODEL_TYPES}
    named = {each for each, written in types.items() if written in words}
    assert named == {each for each in PLAIN if PLAIN[each] == reason}


def test_its_examples_of_chains_are_verified_so():
    [examples] = re.findall(r"\(([^)]*),\.\.\.\)", names("**Chains instead of trees**"))
    assert {*examples.split(",")} <= {each.replace("_", "") for each in CHAIN}


# By the word on the page.
OWN_LOOPS = {
    "Higgs Audio": "HiggsAudioV2",
    "CSM": "Csm",
    "Pocket TTS": "PocketTTS",
    "VibeVoice": "VibeVoice",
    "Voxtral Realtime": "VoxtralRealtime",
}


@pytest.mark.parametrize("name", OWN_LOOPS)
def test_models_with_a_loop_of_their_own_are_refused(name):
    assert name in PAGE.replace("\n ", "")
    kind = getattr(transformers, f"{OWN_LOOPS[name]}ForConditionalGeneration", None)
    if kind is None:
        pytest.skip("this release of transformers has no such model")
    with torch.device("meta"):
        model = kind(kind.config_class())
    with pytest.raises(ValueError, match="needs transformers' own decoding loop"):
        # Some check the voice that a text is to be read with before that.
        GenerationMixin.generate(model, RANDOM_PROMPT, candidate_generator=rs.ReferenceCopy())


@pytest.mark.parametrize("model_type", ["bloom", "qwen3_next", "llama4_text"])
def test_static_caches_take_no_drafts_with_some_attention(model_type, models_by_type, caplog):
    """With ALiBi, a running state and chunks."""
    call = Call(models_by_type(model_type), rows=1, cache_implementation="static")
    assert call.assert_lossless(1.0).drafted == 0
    assert "decodes plainly" in caplog.text


@pytest.mark.parametrize("begun", [False, True])
def test_a_given_static_cache_of_windows_must_be_empty_to_take_drafts(begun, caplog):
    model = small("gemma2")
    plain = model.generate(RANDOM_PROMPT, **GREEDY)
    cache = StaticCache(config=model.config, max_cache_len=64)
    if begun:
        model(RANDOM_PROMPT[:, :5], past_key_values=cache)
    drafter = Prophet(plain, 1.0)
    drafting = {"candidate_generator": drafter, "max_draft_tokens": 8, "past_key_values": cache}
    assert model.generate(RANDOM_PROMPT, **GREEDY, **drafting).tolist() == plain.tolist()
    assert (drafter.stats.drafted == 0) == ("decodes plainly" in caplog.text) == begun


def test_a_pass_over_a_static_cache_verifies_64_nodes_at_most(llama):
    drafter = Fixed(DraftTree(range(80), [-1] * 80, [1 / 80] * 80))
    call = Call(llama, rows=1, cache_implementation="static")
    call.assert_lossless(drafter=drafter, max_draft_tokens=80)
    assert max(len(verified) for _, _, verified in drafter.observed) == 64
