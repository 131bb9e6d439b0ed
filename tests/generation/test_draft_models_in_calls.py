"""Draft models draft in every kind of call, and change no id."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation.candidate_generator import (
    AssistedCandidateGenerator,
    AssistedCandidateGeneratorDifferentTokenizers,
    PromptLookupCandidateGenerator,
)

import hf_refspec as rs
from tests.helpers.architectures import small
from tests.helpers.calls import GREEDY, Call, assert_lossless, padded_prompts
from tests.helpers.calls import RANDOM_PROMPT as PROMPT
from tests.helpers.passes import passes_of
from tests.helpers.running_texts import finish


@pytest.fixture
def blend(llama):
    return rs.ReferenceCopy() | rs.TokenRecycling() | rs.DraftModel(llama)


@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "temperature": 0.7}], ids=str)
@pytest.mark.parametrize("max_draft_tokens", [5, "auto"])
@pytest.mark.parametrize("model_type", ["llama", "gemma2", "mamba2", "mpt", "jamba"])
def test_ids_equal_plain_decoding(models_by_type, model_type, max_draft_tokens, sampling):
    """Drafted by another architecture, as trees, as chains, and where none can be verified."""
    drafter = rs.DraftModel(models_by_type("qwen3" if model_type == "llama" else "llama"))
    for each in (drafter, rs.TokenRecycling() | drafter):
        options = {"max_draft_tokens": max_draft_tokens, **sampling}
        assert_lossless(models_by_type(model_type), each, PROMPT, **options)


@pytest.mark.parametrize("max_draft_tokens", [6, "auto"])
@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}], ids=str)
def test_several_rows(llama, blend, options, max_draft_tokens):
    call = Call(llama, rows=3)
    stats = call.assert_lossless(drafter=blend, max_draft_tokens=max_draft_tokens, **options)
    assert stats.mat > 2 or max_draft_tokens == "auto"


@pytest.mark.parametrize("verification", ["tree", "chain"])
def test_an_assistant_drafts_no_further_than_the_text_goes(llama, verification):
    assistant = copy.deepcopy(llama)
    drafter = rs.DraftModel(assistant)
    for new_tokens in (40, 40, 8):  # it learns that it is always right
        with passes_of(assistant) as passes:
            assert_lossless(llama, drafter, PROMPT, verification, 1024, max_new_tokens=new_tokens)
    assert 0 < len(passes) < 8


SAMPLED = {
    "temperature": {"temperature": 1.7},
    "top-k": {"top_k": 5},
    "top-k and top-p": {"top_k": 30, "top_p": 0.6, "temperature": 0.7},
    "top-p": {"top_p": 0.5},
    "static": {"cache_implementation": "static"},
    "reproducible": {"verification": "reproducible"},
    "tree": {"verification": "tree"},
}


# Reproducible passes are for one row.
ROWS = [(name, rows) for name in SAMPLED for rows in (1, 3) if (name, rows) != ("reproducible", 3)]


@pytest.mark.parametrize(("name", "rows"), ROWS)
def test_the_target_itself_foresees_what_a_seed_draws(llama, name, rows):
    drafter, options = rs.DraftModel(llama), {"do_sample": True, "top_k": 0, **SAMPLED[name]}
    verification = None if name == "reproducible" else options.pop("verification", "chain")
    for seed in (0, 1):
        call = Call(llama, rows, seed=seed, **options)
        for _ in range(2):
            stats = call.assert_lossless(drafter, verification, max_draft_tokens=4)
            assert stats.accepted > 0.6 * stats.drafted or name == "tree"
            assert stats.mat > 1.9


@pytest.mark.parametrize("rows", [1, 3])
def test_an_output_layer_may_be_larger_than_the_vocabulary(fresh_llama, llama, rows):
    own = llama.lm_head.weight.data
    fresh_llama.lm_head.weight = torch.nn.Parameter(torch.cat([own, 0 * own[:7]]))
    drafter, inputs = rs.DraftModel(llama), padded_prompts(rows)
    assert assert_lossless(fresh_llama, drafter, inputs, do_sample=True, top_k=5).mat > 1.5


def test_random_numbers_that_a_processor_draws_change_no_id(llama):
    def drawing(input_ids, scores):
        return scores + torch.rand(())

    options = {"do_sample": True, "temperature": 1.7, "logits_processor": [drawing]}
    assert assert_lossless(llama, rs.DraftModel(llama), **options).drafted > 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reproducible_passes(blend, models_by_type, dtype):
    call = Call(models_by_type("llama", dtype), verification="reproducible")
    assert call.assert_lossless(blend, max_draft_tokens=6).mat > 1.5


@pytest.mark.parametrize("all_models", [False, True])
def test_attached_and_called_in_several_threads(llama, blend, all_models):
    """The assistant's own passes draft nothing."""
    plain, attached = llama.generate(PROMPT, **GREEDY).tolist(), None if all_models else llama
    with (
        rs.attach(attached, blend, max_draft_tokens=6) as attachment,
        ThreadPoolExecutor(3) as pool,
    ):
        calls = [pool.submit(llama.generate, PROMPT, **GREEDY) for _ in range(6)]
        assert all(call.result().tolist() == plain for call in calls)
    assert attachment.stats.sources[2].accepted > 0


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("max_draft_tokens", [6, "auto"])
def test_a_running_batch(llama, max_draft_tokens, do_sample):
    """Each text has its own random numbers."""
    options = {**GREEDY, "do_sample": do_sample}
    batch = rs.RunningBatch(llama, max_draft_tokens=max_draft_tokens)
    prompts = [PROMPT, PROMPT[:, 3:], PROMPT[:, :7]]
    drafters = [rs.ReferenceCopy() | rs.DraftModel(llama) for _ in prompts]
    texts = [
        batch.add(input_ids=prompt, candidate_generator=drafter, seed=5, **options)
        for prompt, drafter in zip(prompts, drafters, strict=True)
    ]
    finish(batch)
    for prompt, text in zip(prompts, texts, strict=True):
        torch.manual_seed(5)
        assert text.sequences.tolist() == llama.generate(prompt, **options).tolist()
        assert text.stats.mat > 2 or max_draft_tokens == "auto"


@pytest.mark.parametrize("part", [None, "transformer.drop"])
def test_a_generator_of_transformers_uses_up_no_random_numbers(llama, part):
    assistant = small("gpt2", embd_pdrop=0.5)
    assistant.get_submodule(part or "").train()
    config = GenerationConfig(max_length=64, min_length=0, do_sample=True, eos_token_id=None)
    generator = AssistedCandidateGenerator(PROMPT, assistant, config, {})
    assert assert_lossless(llama, generator, PROMPT, do_sample=True) is None


def of_another_tokenizer(_, tokenizer, *about):
    other = copy.deepcopy(tokenizer)
    other.add_tokens(["the "])
    assistant = small("llama", vocab_size=len(other))
    return AssistedCandidateGeneratorDifferentTokenizers(
        PROMPT, assistant, tokenizer, other, *about
    )


GENERATORS = {
    "assisted": lambda model, _, *about: AssistedCandidateGenerator(PROMPT, model, *about),
    "prompt look-up": lambda *_: PromptLookupCandidateGenerator(max_length=64),
    "of another tokenizer": of_another_tokenizer,
}


@pytest.mark.parametrize("sampling", [{}, {"do_sample": True}], ids=str)
@pytest.mark.parametrize("kind", GENERATORS)
def test_generators_of_transformers_in_a_blend(byte_llama, tokenizer, kind, sampling):
    """A drafter that is attached to all models drafts for the target."""
    config = GenerationConfig(max_length=64, min_length=0, do_sample=False, eos_token_id=None)
    about = config, {"candidate_generator": None}
    blend = rs.TokenRecycling() | GENERATORS[kind](byte_llama, tokenizer, *about)
    with rs.attach(drafter=rs.ReferenceCopy()):
        stats = assert_lossless(byte_llama, blend, PROMPT, max_draft_tokens=12, **sampling)
    assert stats.sources[1].drafted > 0
