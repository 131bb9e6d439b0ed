"""Ids equal plain decoding's in float32 for each kind of architecture, greedy and sampled."""

import numpy as np
import pytest
import torch
import transformers
from packaging.version import Version

import hf_refspec as rs
from tests.helpers.architectures import ARCHITECTURES, Architecture, small
from tests.helpers.calls import RANDOM_PROMPT as PROMPT
from tests.helpers.calls import Alternating, Call, assert_lossless
from tests.helpers.drafters import Noise

TREES = [a for a in ARCHITECTURES if a.verification == "tree"]

STATIC = {"cache_implementation": "static"}
# Some without an end-of-text token, so that texts end both ways.
GENERATION = {
    "greedy": {"do_sample": False, "eos_token_id": None},
    "repetition penalty": {"do_sample": False, "repetition_penalty": 1.3, "eos_token_id": None},
    "no repeated bigrams": {"do_sample": False, "no_repeat_ngram_size": 2, "eos_token_id": None},
    "temperature": {"do_sample": True, "temperature": 0.7},
    "top-k": {"do_sample": True, "top_k": 5, "eos_token_id": None},
    "top-p": {"do_sample": True, "top_p": 0.8, "top_k": 0, "eos_token_id": None},
    "stateful": {"do_sample": True, "top_k": 10, "eos_token_id": None},
    "static": {"do_sample": False, "eos_token_id": None, **STATIC},
    "static, top-k": {"do_sample": True, "top_k": 5, "eos_token_id": None, **STATIC},
}


# BLOOM of transformers 5.20 raises at the mask of a static cache.
ALIBI = [Architecture("bloom")] if Version(transformers.__version__) >= Version("5.21") else []


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *ALIBI], ids=str)
def test_ids_equal_plain_decoding(architecture, models_by_type, caplog):
    """Running states and models without position ids decode plainly with a static cache."""
    model = models_by_type(architecture.model_type)
    for number, generation in enumerate(GENERATION):
        options = {"max_new_tokens": 24, "eos_token_id": 2, **GENERATION[generation]}
        stateful = {"logits_processor": [Alternating()]} if generation == "stateful" else {}
        call = Call(model, inputs={"input_ids": PROMPT}, **options, **stateful)
        good, bad = (call.drafter(accuracy, seed=number) for accuracy in (0.9, 0.0))
        for drafter in (good, (bad, Noise(), rs.ReferenceCopy())[number % 3]):
            stateful = {"logits_processor": [Alternating()]} if stateful else {}
            call.assert_lossless(drafter, max_draft_tokens=12, drafting=stateful)
        suited = ("tree",) if "static" in generation else ("tree", "chain")
        if architecture.verification in suited:
            assert good.stats.mat > 1.5 or call.plain.shape[1] < PROMPT.shape[1] + 8
            assert bad.stats.accepted == 0
    fell_back = "decodes plainly" in caplog.text
    assert fell_back == (architecture.verification != "tree")


@pytest.mark.parametrize("architecture", TREES, ids=str)
def test_rows_equal_plain_batched_decoding(architecture, models_by_type):
    call = Call(models_by_type(architecture.model_type), rows=5, seed=5)
    accuracies = np.linspace(0.95, 0.2, 5)
    for options in ({"verification": "chain"}, {}, STATIC):
        assert call.assert_lossless(accuracies, max_draft_tokens=12, **options).mat > 1.2
    call.assert_lossless(drafter=Noise(), max_draft_tokens=12)


# Under the 4D mask of a tree the last three have other logits behind padding (ALiBi, no positions).
NOT_BEHIND_PADDING = ["falcon", "openai-gpt", "git"]


@pytest.mark.parametrize(
    "model_type", ["llama", "gpt2", "mistral", "gemma2", "mamba2", *NOT_BEHIND_PADDING]
)
def test_a_padded_prompt_gives_the_same_ids(model_type, models_by_type):
    model = small("falcon", alibi=True) if model_type == "falcon" else models_by_type(model_type)
    prompts = torch.cat([torch.zeros((1, 5), dtype=torch.long), PROMPT], dim=-1).repeat(2, 1)
    prompts[1, :5] = 7
    inputs = {"input_ids": prompts, "attention_mask": (prompts != 0).long()}
    for drafter, nodes in ((0.8, 8), (rs.ReferenceCopy(), 8), (rs.ReferenceCopy(), 0)):
        for rows in (1, 2):
            padded = {name: each[:rows] for name, each in inputs.items()}
            assert_lossless(model, drafter, padded, max_draft_tokens=nodes, pad_token_id=0)


@pytest.mark.parametrize("model_type", ["llama", "phi3", "mistral", "qwen3_next", "mamba2"])
def test_bfloat16_differs_only_at_near_ties(model_type, models_by_type):
    model = models_by_type(model_type)
    model = type(model)(model.config).to(torch.bfloat16).eval()
    options = {"return_dict_in_generate": True, "output_logits": True}
    call = Call(model, inputs={"input_ids": PROMPT}, **options)
    drafted = call.generate(candidate_generator=call.drafter(), max_draft_tokens=8)
    ids = zip(drafted.sequences[0].tolist(), call.plain_ids[0].tolist(), strict=True)
    for position, (mine, theirs) in enumerate(ids):
        if mine != theirs:
            logits = call.plain.logits[position - PROMPT.shape[1]][0]
            gap = (logits.max() - logits[mine]).item()
            assert gap <= 4 * torch.finfo(torch.bfloat16).eps * logits.abs().max().item()
            break
