"""The probe tells ways that are exact from those that are not."""

from __future__ import annotations

import pytest
import torch
from architectures import VOCAB_SIZE
from calls import PROMPT
from drafters import Noise, Prophet
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPTNeoConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

import hf_refspec as rs
from hf_refspec.verification import probe
from hf_refspec.verification import verifier as verification
from hf_refspec.verification.verifier import ChainVerification, TreeVerification

OPTIONS = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
SMALL = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.25,
    "pad_token_id": 0,
}


def small_llama(dtype=torch.float32, **config) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SMALL, **config})).to(dtype).eval()


def verified_as(model, prompt=PROMPT, **kwargs) -> str:
    """The way that a call takes; `None` where it decodes plainly."""
    drafter = Noise()
    model.generate(prompt, candidate_generator=drafter, max_new_tokens=3, **kwargs)
    ways = [key[0] for key, exact in probe._probed[model].items() if exact]
    return ways[0].name if ways else "none"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("model_type", ["llama", "olmo2", "gpt2", "qwen3_moe"])
def test_a_deep_model_in_a_short_type_gets_its_tree(model_type, dtype, models_by_type):
    config = models_by_type(model_type).config.to_dict()
    for name in ("layer_types", "n_layer"):
        config.pop(name, None)
    config |= {"num_hidden_layers": 24, "hidden_size": 64, "initializer_range": 0.05}
    if model_type == "gpt2":
        config |= {"n_layer": 24, "n_embd": 64}
    torch.manual_seed(0)
    config = AutoConfig.for_model(**config)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    assert verified_as(model) == "tree"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("model_type", ["mamba", "falcon_mamba", "jamba"])
def test_a_model_that_forgets_its_state_is_found_out(model_type, dtype, models_by_type):
    model = models_by_type(model_type)
    model = type(model)(model.config).to(dtype).eval()
    assert verified_as(model) == "none"


def test_a_commit_that_keeps_the_wrong_entries_is_found_out(monkeypatch):
    monkeypatch.setattr(verification, "_move_entries", lambda *_: None)
    assert verified_as(small_llama()) == "chain"


def test_a_mask_that_is_not_heeded_is_found_out(monkeypatch):
    def all_visible(self, draft, padding_mask, device):
        size = 1 + len(draft)
        return torch.ones(1, 1, size, self.cache.get_seq_length() + size, dtype=torch.bool)

    monkeypatch.setattr(TreeVerification, "_attention_mask", all_visible)
    assert verified_as(small_llama()) == "chain"


def test_local_attention_gets_a_chain():
    """GPT-Neo keeps all of its cache and attends to a window of it."""
    config = GPTNeoConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=16,
        initializer_range=0.25,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    plain = model.generate(PROMPT, **OPTIONS)
    drafter = Prophet(plain, accuracy=0.8)
    assert model.generate(PROMPT, candidate_generator=drafter, **OPTIONS).tolist() == plain.tolist()
    assert verified_as(model) == "chain"


@pytest.mark.parametrize("vocab_size", [16, 30, 60])
def test_a_small_vocabulary_can_be_probed(vocab_size):
    prompt = torch.tensor([[5, 9, 12, 7, 5, 9]])
    assert verified_as(small_llama(vocab_size=vocab_size), prompt) == "tree"


def test_is_done_once_and_not_at_all_without_drafts(monkeypatch):
    model = small_llama()
    passes = []
    model.register_forward_pre_hook(lambda *_: passes.append(1))
    counts = []
    for budget in (0, 8, 8):
        passes.clear()
        options = {**OPTIONS, "max_new_tokens": 4, "max_draft_tokens": budget}
        drafter = Noise()
        model.generate(PROMPT, candidate_generator=drafter, **options)
        counts.append(len(passes) - drafter.stats.forward_passes)
    assert counts[0] == counts[2] == 0 < counts[1]


def test_running_out_of_memory_is_not_taken_for_an_answer(monkeypatch):
    model = small_llama()

    def out_of_memory(*_):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(probe, "_probe", out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        model.generate(PROMPT, candidate_generator=Noise(), **OPTIONS)
    monkeypatch.undo()
    assert verified_as(model) == "tree"


def test_dropout_at_work_is_decoded_plainly():
    model = small_llama(attention_dropout=0.3).train()
    torch.manual_seed(0)
    plain = model.generate(PROMPT, **OPTIONS)
    torch.manual_seed(0)
    drafted = model.generate(PROMPT, candidate_generator=rs.ReferenceCopy(), **OPTIONS)
    assert drafted.tolist() == plain.tolist()


def test_a_way_that_the_probe_refuses_can_not_be_had(monkeypatch):
    monkeypatch.setattr(probe, "_probe", lambda way, *_: way is ChainVerification)
    with pytest.raises(ValueError, match="verification='tree'"):
        small_llama().generate(
            PROMPT, candidate_generator=Noise(), verification="tree", max_new_tokens=3
        )
