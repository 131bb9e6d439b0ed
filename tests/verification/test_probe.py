"""The probe tells verifiers that are exact from those that are not."""

from __future__ import annotations

import pytest
import torch
from architectures import VOCAB_SIZE
from calls import PROMPT, prepared
from drafters import Noise, Prophet, Prophets
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPTNeoConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

import hf_refspec as rs
from hf_refspec.verification import entries
from hf_refspec.verification.chain import ChainVerifier
from hf_refspec.verification.choice import select_verifier
from hf_refspec.verification.probe import probe
from hf_refspec.verification.tree import TreeVerifier

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
BATCH = {
    "input_ids": torch.cat([PROMPT, PROMPT.flip(1)]),
    "attention_mask": torch.ones((2, PROMPT.shape[1]), dtype=torch.int64),
}


def small_llama(dtype=torch.float32, **config) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SMALL, **config})).to(dtype).eval()


@torch.no_grad()
def verified_as(model, rows: int = 1, prompt=PROMPT) -> str:
    """The verifier that a call gets; "none" where it decodes plainly."""
    config, kwargs = prepared(model, prompt.repeat(rows, 1), max_new_tokens=3)
    verifier, found = select_verifier(model, "auto", rows, config, kwargs)
    assert (verifier is None) == bool(found)
    return "none" if verifier is None else verifier.name


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
    assert verified_as(model) == verified_as(model, rows=3) == "tree"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("model_type", ["mamba", "falcon_mamba", "jamba"])
def test_a_model_that_forgets_its_state_is_found_out(model_type, dtype, models_by_type):
    model = models_by_type(model_type)
    model = type(model)(model.config).to(dtype).eval()
    assert verified_as(model) == "none"


def heed_no_mask(model, args, kwargs):
    mask = kwargs.get("attention_mask")
    if mask is not None and mask.ndim == 4:
        kwargs["attention_mask"] = torch.ones_like(mask)
    return args, kwargs


def test_a_mask_that_is_not_heeded_is_found_out():
    model = small_llama()
    model.register_forward_pre_hook(heed_no_mask, with_kwargs=True)
    assert verified_as(model) == "chain"
    assert verified_as(model, rows=2) == "none"


def as_float32(model, args, output):
    output.logits = output.logits.float()


@torch.no_grad()
def test_other_branches_are_compared_also_where_logits_are_longer_than_the_weights():
    model = small_llama(torch.bfloat16)
    model.register_forward_pre_hook(heed_no_mask, with_kwargs=True)
    model.register_forward_hook(as_float32)
    _, kwargs = prepared(model, PROMPT, max_new_tokens=3)
    assert probe(TreeVerifier, model, 1, kwargs).leak > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_asked_for_and_refused_is_an_error_with_the_numbers(dtype):
    model = small_llama(dtype)
    model.register_forward_pre_hook(heed_no_mask, with_kwargs=True)
    number = r"\d\.\de[+-]\d\d"
    leak = "" if dtype == torch.float32 else rf", and .* change them by {number}"
    refused = (
        r"`verification='tree'` is not exact on LlamaForCausalLM with this cache .* \(tree: logits "
        rf"are {number} off .* rounding alone makes {number}{leak}\)"
    )
    with pytest.raises(ValueError, match=refused):
        model.generate(PROMPT, candidate_generator=Noise(), verification="tree", **OPTIONS)


def test_moved_entries_at_wrong_places_are_found_out(monkeypatch, caplog):
    model = small_llama()
    monkeypatch.setattr(entries, "move_entries", lambda *_: None)
    assert verified_as(model) == "chain"
    with pytest.raises(ValueError, match=r"`verification='tree'` is not exact .* with 2 rows"):
        model.generate(**BATCH, candidate_generator=Noise(), verification="tree", **OPTIONS)
    plain = model.generate(**BATCH, **OPTIONS)
    drafted = model.generate(**BATCH, candidate_generator=Noise(), **OPTIONS)
    assert drafted.tolist() == plain.tolist()
    assert "decoding plainly" in caplog.text and "off those of single steps" in caplog.text


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


# --- the text


@pytest.mark.parametrize("vocab_size", [16, 30, 60])
def test_a_small_vocabulary_can_be_probed(vocab_size):
    prompt = torch.tensor([[5, 9, 12, 7, 5, 9]])
    assert verified_as(small_llama(vocab_size=vocab_size), prompt=prompt) == "tree"


@pytest.mark.parametrize("rows", [1, 2])
def test_special_tokens_at_the_lowest_ids_do_not_matter(rows):
    """After a text of them a trained model's logits are flat: rounding is all that there is."""
    model = small_llama()
    with torch.no_grad():
        model.model.embed_tokens.weight[:16] = 0
    assert verified_as(model, rows) == "tree"
    inputs = {name: 20 + value[:rows] for name, value in BATCH.items() if name == "input_ids"}
    inputs["attention_mask"] = BATCH["attention_mask"][:rows]
    plain = model.generate(**inputs, **OPTIONS)
    drafter = Prophets(inputs, plain, 0.9)
    drafted = model.generate(**inputs, candidate_generator=drafter, max_draft_tokens=8, **OPTIONS)
    assert drafted.tolist() == plain.tolist()
    assert drafter.stats.mat > 1.5


class Disturbing:
    """Disturbs the logits of the first passes over a tree."""

    def __init__(self, model, passes: int):
        self.left = passes
        model.register_forward_hook(self, with_kwargs=True)

    def __call__(self, model, args, kwargs, outputs):
        mask = kwargs.get("attention_mask")
        if mask is not None and mask.ndim == 4 and self.left > 0:
            self.left -= 1
            outputs.logits += torch.randn_like(outputs.logits)
        return outputs


@pytest.mark.parametrize("rows", [1, 2])
def test_a_verifier_that_is_refused_on_one_text_is_tried_on_a_second(rows):
    model = small_llama()
    disturbing = Disturbing(model, 1)
    assert verified_as(model, rows) == "tree"
    assert disturbing.left == 0
    model = small_llama()
    Disturbing(model, 100)
    assert verified_as(model, rows) == ("chain" if rows == 1 else "none")


# --- what is found, and kept


@torch.no_grad()
def test_a_finding_has_the_numbers(llama):
    _, kwargs = prepared(llama, PROMPT, max_new_tokens=3)
    for kind, boundary in ((TreeVerifier, None), (ChainVerifier, None), (ChainVerifier, 20)):
        finding = probe(kind, llama, 1, kwargs, boundary)
        assert finding.exact
        assert 0 < finding.error < 1e-5 and 0 < finding.rounding < 1e-5
        assert f"{finding.error:.1e}" in str(finding)


def test_is_done_once_and_not_at_all_without_drafts():
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


def test_running_out_of_memory_is_not_taken_for_an_answer():
    model = small_llama()

    def out_of_memory(model, args, kwargs):
        if kwargs.get("attention_mask", PROMPT).ndim == 4:
            raise torch.OutOfMemoryError("no memory")

    hook = model.register_forward_pre_hook(out_of_memory, with_kwargs=True)
    with pytest.raises(torch.OutOfMemoryError):
        model.generate(PROMPT, candidate_generator=Noise(), **OPTIONS)
    hook.remove()
    assert verified_as(model) == "tree"


def test_whatever_else_a_model_raises_is_a_finding(caplog):
    model = small_llama()

    def refuse(model, args, kwargs):
        if kwargs["input_ids"].shape[1] > 1 and kwargs["past_key_values"].get_seq_length() > 0:
            raise NotImplementedError("one token at a time")

    plain = model.generate(PROMPT, **OPTIONS)
    model.register_forward_pre_hook(refuse, with_kwargs=True)
    drafted = model.generate(PROMPT, candidate_generator=Noise(), **OPTIONS)
    assert drafted.tolist() == plain.tolist()
    assert "NotImplementedError('one token at a time')" in caplog.text


@pytest.mark.parametrize("rows", [1, 2])
def test_dropout_at_work_is_decoded_plainly(rows, caplog):
    model, texts = small_llama(attention_dropout=0.3).train(), []
    inputs = {name: value[:rows] for name, value in BATCH.items()}
    for drafter in (None, Noise(), rs.ReferenceCopy()):
        torch.manual_seed(0)
        texts.append(model.generate(**inputs, candidate_generator=drafter, **OPTIONS).tolist())
    assert texts[0] == texts[1] == texts[2]
    assert "dropout is at work" in caplog.text


@pytest.mark.parametrize("max_draft_tokens", [0, 8])
@pytest.mark.parametrize("rows", [1, 2])
def test_gradient_checkpointing_at_work_is_decoded_plainly(rows, max_draft_tokens, caplog):
    """In training the layers then run without the cache; a model that was probed before too."""
    model = small_llama()
    inputs = {name: value[:rows] for name, value in BATCH.items()}
    options = {**inputs, **OPTIONS}
    drafting = {"candidate_generator": rs.ReferenceCopy(), "max_draft_tokens": max_draft_tokens}
    model.generate(**options, **drafting)
    model.gradient_checkpointing_enable()
    model.train()
    assert model.generate(**options, **drafting).tolist() == model.generate(**options).tolist()
    assert "gradient checkpointing is at work" in caplog.text


@pytest.mark.parametrize("on_disk", [("model.embed_tokens", "lm_head"), ("model.layers.1",)])
def test_a_model_with_offloaded_weights_is_probed(on_disk, tmp_path):
    small_llama(num_key_value_heads=2).save_pretrained(tmp_path)
    parts = ("embed_tokens", "layers.0", "layers.1", "norm", "rotary_emb")
    devices = dict.fromkeys((*(f"model.{part}" for part in parts), "lm_head"), "cpu")
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path,
        device_map=devices | dict.fromkeys(on_disk, "disk"),
        offload_folder=tmp_path / "offloaded",
    )
    plain = model.generate(PROMPT, **OPTIONS)
    options = {**OPTIONS, "candidate_generator": (drafter := Prophet(plain, 1.0))}
    assert torch.equal(model.generate(PROMPT, **options, max_draft_tokens=8), plain)
    assert drafter.stats.forward_passes < OPTIONS["max_new_tokens"] / 2
