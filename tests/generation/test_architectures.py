"""Ids equal plain decoding's in float32 for each kind of architecture, greedy and sampled."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from architectures import ARCHITECTURES, VOCAB_SIZE
from calls import Alternating, Call, assert_lossless
from drafters import Noise, Prophet
from transformers import LogitsProcessorList

import hf_refspec as rs

TREES = [a for a in ARCHITECTURES if a.verification == "tree"]
VERIFIED = [a for a in ARCHITECTURES if a.verification != "none"]
PROMPT = torch.randint(3, VOCAB_SIZE, (1, 12), generator=torch.Generator().manual_seed(1))


# Some without an end-of-text token, so that texts end both ways.
GENERATION = {
    "greedy": {"do_sample": False, "eos_token_id": None},
    "repetition penalty": {"do_sample": False, "repetition_penalty": 1.3, "eos_token_id": None},
    "no repeated bigrams": {"do_sample": False, "no_repeat_ngram_size": 2, "eos_token_id": None},
    "temperature": {"do_sample": True, "temperature": 0.7},
    "top-k": {"do_sample": True, "top_k": 5, "eos_token_id": None},
    "top-p": {"do_sample": True, "top_p": 0.8, "top_k": 0, "eos_token_id": None},
    "stateful": {"do_sample": True, "top_k": 10, "eos_token_id": None},
}


def generate(model, generation: str, prompt=PROMPT, new_tokens: int = 24, **kwargs):
    torch.manual_seed(5)
    if generation == "stateful":
        kwargs["logits_processor"] = LogitsProcessorList([Alternating()])
    return model.generate(prompt, max_new_tokens=new_tokens, **{**GENERATION[generation], **kwargs})


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=str)
def test_ids_equal_plain_decoding(architecture, models_by_type, caplog):
    model = models_by_type(architecture.model_type)
    for number, generation in enumerate(GENERATION):
        plain = generate(model, generation)
        good = Prophet(plain, accuracy=0.9, seed=number)
        bad = Prophet(plain, accuracy=0.0, seed=number)
        for drafter in (good, (bad, Noise(), rs.ReferenceCopy())[number % 3]):
            drafted = generate(model, generation, candidate_generator=drafter, max_draft_tokens=12)
            assert drafted.tolist() == plain.tolist(), (generation, type(drafter).__name__)
        if architecture.verification != "none":
            assert good.stats.mat > 1.5 or plain.shape[1] < PROMPT.shape[1] + 8
            assert bad.stats.accepted == 0
    fell_back = "decodes plainly" in caplog.text
    assert fell_back == (architecture.verification == "none")


@pytest.mark.parametrize("architecture", TREES, ids=str)
def test_rows_equal_plain_batched_decoding(architecture, models_by_type):
    call = Call(models_by_type(architecture.model_type), rows=5, seed=5)
    unequal = call.drafter(np.linspace(0.95, 0.2, 5))
    for drafter, verification in ((unequal, "chain"), (Noise(), "auto"), (unequal, "auto")):
        options = {"candidate_generator": drafter, "verification": verification}
        assert call.generate(max_draft_tokens=12, **options).tolist() == call.plain.tolist()
        assert drafter.stats.mat > 1.2 or drafter is not unequal


@pytest.mark.parametrize("architecture", VERIFIED, ids=str)
def test_gets_the_verification_that_suits_it(architecture, models_by_type):
    """A call may ask for it; a tree is refused where only a chain is exact."""
    model = models_by_type(architecture.model_type)
    assert_lossless(model, 0.9, PROMPT, "chain", max_draft_tokens=12)
    if architecture.verification == "tree":
        assert_lossless(model, 0.9, PROMPT, "tree", max_draft_tokens=12)
    else:
        with pytest.raises(ValueError, match="verification='tree'"):
            generate(model, "greedy", verification="tree", candidate_generator=Noise())


@pytest.mark.parametrize("architecture", VERIFIED, ids=str)
def test_the_returned_cache_goes_on_as_plain_decoding_does(architecture, models_by_type):
    model = models_by_type(architecture.model_type)
    options = {"return_dict_in_generate": True, "new_tokens": 20}
    plain = generate(model, "greedy", **options)
    options |= {"candidate_generator": Prophet(plain.sequences, 0.7), "max_draft_tokens": 8}
    drafted = generate(model, "greedy", **options)
    assert drafted.sequences.tolist() == plain.sequences.tolist()
    texts = []
    for output in (plain, drafted):
        more = torch.cat([output.sequences, PROMPT[:, :3]], dim=-1)
        texts.append(generate(model, "greedy", more, past_key_values=output.past_key_values))
    assert texts[0].tolist() == texts[1].tolist()
    lengths = [output.past_key_values.get_seq_length() for output in (plain, drafted)]
    assert lengths[0] == lengths[1]


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "mistral", "gemma2", "mamba2"])
def test_a_padded_prompt_gives_the_same_ids(model_type, models_by_type):
    prompt = torch.cat([torch.zeros((1, 5), dtype=torch.long), PROMPT], dim=-1)
    inputs = {"input_ids": prompt, "attention_mask": (prompt != 0).long()}
    for drafter in (0.8, rs.ReferenceCopy()):
        assert_lossless(models_by_type(model_type), drafter, inputs)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("model_type", ["llama", "gpt2", "qwen3_moe", "mistral"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_eager_attention_and_sdpa_both_give_the_same_ids(
    model_type, attention, rows, models_by_type
):
    model = models_by_type(model_type)
    before = model.config._attn_implementation
    model.set_attn_implementation(attention)
    try:
        stats = Call(model, rows).assert_lossless([0.9, 0.7, 0.2])
        assert stats.mat > 1.5 or (model_type == "mistral" and rows > 1)
    finally:
        model.set_attn_implementation(before)


@pytest.mark.parametrize("model_type", ["llama", "phi3", "mistral", "qwen3_next", "mamba2"])
def test_bfloat16_differs_only_at_near_ties(model_type, models_by_type):
    model = models_by_type(model_type)
    model = type(model)(model.config).to(torch.bfloat16).eval()
    options = {"return_dict_in_generate": True, "output_logits": True}
    plain = generate(model, "greedy", **options)
    drafter = Prophet(plain.sequences, accuracy=0.8)
    ids = generate(model, "greedy", candidate_generator=drafter, max_draft_tokens=8)[0].tolist()
    for position, (mine, theirs) in enumerate(zip(ids, plain.sequences[0].tolist(), strict=True)):
        if mine != theirs:
            logits = plain.logits[position - PROMPT.shape[1]][0]
            gap = (logits.max() - logits[mine]).item()
            assert gap <= 4 * torch.finfo(torch.bfloat16).eps * logits.abs().max().item()
            break
