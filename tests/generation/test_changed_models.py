"""A model may be changed between calls: what was found out about it before no longer counts."""

from __future__ import annotations

import contextlib
import copy
from types import MethodType

import pytest
import torch
from architectures import ARCHITECTURES, Architecture, build
from calls import PROMPT
from drafters import Prophet

from hf_refspec.verification.facts import facts_about_state

OPTIONS = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
BY_TYPE = {architecture.model_type: architecture for architecture in ARCHITECTURES}


def drafted(model, plain):
    drafter = Prophet(plain, accuracy=0.8)
    torch.manual_seed(0)
    ids = model.generate(PROMPT, candidate_generator=drafter, max_draft_tokens=6, **OPTIONS)
    return ids, drafter.stats.mat


def check(model) -> float:
    """Compares with plain decoding, and returns the MAT."""
    torch.manual_seed(0)
    plain = model.generate(PROMPT, **OPTIONS)
    ids, mat = drafted(model, plain)
    assert ids.tolist() == plain.tolist()
    return mat


def steer_last_token(model):
    """Changes the last token of each pass, as if passes had only one."""

    def steer(module, args, output):
        output[:, -1] += 3.0
        return output

    return model.model.layers[0].mlp.register_forward_hook(steer)


def ends_with_zero(module, args, output):
    output[:, -1] = 0.0


class Reading:
    only_reads = True

    def __call__(self, module, args, output):
        pass


@pytest.fixture
def model():
    """One of which something has been found out."""
    model = build(BY_TYPE["llama"])
    assert check(model) > 1.5
    return model


def test_a_steering_hook_is_seen_and_its_removal_too(model):
    handle = steer_last_token(model)
    assert check(model) == 1.0  # no pass over several tokens is like single ones
    handle.remove()
    assert check(model) > 1.5


def test_a_hook_on_every_token_alike_lets_drafts_go_on(model):
    model.model.layers[0].register_forward_hook(lambda module, args, output: output * 1.01)
    assert check(model) > 1.5


def test_layers_quantised_in_place_are_seen(model):
    """Activations are scaled by all tokens of a pass."""
    torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, inplace=True)
    assert check(model) == 1.0
    plain = model.generate(PROMPT, **OPTIONS)
    options = {"candidate_generator": "auto", "max_draft_tokens": 0, **OPTIONS}
    assert model.generate(PROMPT, **options).tolist() == plain.tolist()


@pytest.mark.parametrize("nodes", [0, 8])
def test_a_model_without_a_cache_that_no_draft_suits_is_decoded_without_one(model, nodes):
    """Its passes over all tokens are not those over the last."""
    torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, inplace=True)
    model.generation_config.use_cache = False
    plain = model.generate(PROMPT, **OPTIONS)
    drafting = {"candidate_generator": "auto", "max_draft_tokens": nodes}
    assert model.generate(PROMPT, **drafting, **OPTIONS).tolist() == plain.tolist()


@pytest.mark.parametrize("offload", ["cpu", "disk"])
def test_offloaded_weights_are_drafted_for(offload, tmp_path):
    """They stand nowhere between passes, and each pass that is saved is a transfer saved."""
    accelerate = pytest.importorskip("accelerate")
    model = build(BY_TYPE["llama"])
    before = check(model)
    if offload == "cpu":
        accelerate.cpu_offload(model, execution_device="cpu")
    else:
        accelerate.disk_offload(model, tmp_path, execution_device="cpu")
    assert check(model) == before
    facts_about_state(model)["a fact"] = 1
    check(model)
    assert "a fact" in facts_about_state(model)  # new weights at every pass are the same model


@pytest.mark.parametrize("model_type", ["opt", "bloom", "falcon", "biogpt", "gpt2", "llama"])
def test_dropout_in_training_mode_is_decoded_plainly(model_type):
    """Some have modules for it, others call a function, with a rate of their own or of theirs."""
    architecture = BY_TYPE[model_type]
    rates = ("dropout", "hidden_dropout", "hidden_dropout_prob", "resid_pdrop", "attention_dropout")
    config = architecture.config | dict.fromkeys(rates, 0.3)
    model = build(Architecture(model_type, "tree", config))
    before = check(model)
    model.train()
    assert check(model) == 1.0
    model.eval()
    assert check(model) == before > 1.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_little_dropout_is_found_by_the_random_numbers_it_draws(model, dtype):
    model.to(dtype).train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 1e-3
    state = torch.get_rng_state()
    torch.manual_seed(0)
    plain = model.generate(PROMPT, **OPTIONS)
    assert drafted(model, plain)[1] == 1.0
    torch.set_rng_state(state)


def test_a_probe_leaves_random_numbers_alone(model):
    model.model.layers[0].register_forward_hook(
        lambda module, args, output: output + 1e-2 * torch.randn_like(output)
    )
    torch.manual_seed(0)
    plain = model.generate(PROMPT, **OPTIONS)
    after = torch.get_rng_state()
    ids, mat = drafted(model, plain)
    assert mat == 1.0 and ids.tolist() == plain.tolist()
    assert torch.equal(torch.get_rng_state(), after)


def test_what_fails_under_autocast_is_asked_again_without():
    model = build(BY_TYPE["llama"])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        drafted(model, model.generate(PROMPT, **OPTIONS))
    assert check(model) > 1.5


def test_a_module_that_was_swapped_is_seen(model):
    class LastOnly(torch.nn.Module):
        def forward(self, states):
            states = states.clone()
            states[:, -1] += 3.0
            return states

    for layer in model.model.layers:
        layer.mlp = LastOnly()
    assert check(model) == 1.0


def test_a_state_that_a_models_own_modules_hold_is_not_probed_away():
    """RecurrentGemma's, which no cache has: a probe is a text of its own."""
    texts = []
    for drafter in (None, "auto"):
        model = build(BY_TYPE["recurrent_gemma"])
        first = model.generate(PROMPT, return_dict_in_generate=True, **OPTIONS)
        options = {"past_key_values": first.past_key_values, "candidate_generator": drafter}
        texts.append(model.generate(first.sequences, **options, **OPTIONS).tolist())
    assert texts[0] == texts[1]


class TestFactsAboutAState:
    """They are found again where nothing changed, and only there."""

    @pytest.mark.parametrize(
        "change",
        {
            "training mode": lambda model: model.model.layers[0].train(),
            "a rate of dropout": lambda model: setattr(
                model.model.layers[0].self_attn, "attention_dropout", 0.5
            ),
            "a hook": steer_last_token,
            "a weight of another type": lambda model: model.lm_head.half(),
            "a new weight": lambda model: setattr(
                model.lm_head, "weight", torch.nn.Parameter(model.lm_head.weight.data)
            ),
            "another attention": lambda model: model.set_attn_implementation("eager"),
            "a configuration": lambda model: setattr(model.config, "sliding_window", 4),
            "a forward of its own": lambda model: setattr(model, "forward", model.forward),
            "a swapped module": lambda model: setattr(model, "lm_head", copy.copy(model.lm_head)),
        }.items(),
        ids=lambda change: change[0],
    )
    def test_what_can_change_logits_makes_another_state(self, llama, change):
        model = copy.deepcopy(llama)
        facts_about_state(model)["a fact"] = 1
        assert facts_about_state(model)["a fact"] == 1
        change[1](model)
        assert "a fact" not in facts_about_state(model)

    def test_adapters_that_are_switched_on_and_off_keep_theirs(self, llama):
        peft = pytest.importorskip("peft")
        model = copy.deepcopy(llama)
        config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
        adapted = peft.get_peft_model(model, config)
        facts_about_state(model)["adapter"] = True
        with adapted.disable_adapter():
            assert "adapter" not in facts_about_state(model)
            facts_about_state(model)["adapter"] = False
        assert facts_about_state(model)["adapter"] is True
        with adapted.disable_adapter():
            assert facts_about_state(model)["adapter"] is False

    @pytest.mark.parametrize(
        "change",
        {
            "the same hook": lambda model: model.lm_head.register_forward_hook(ends_with_zero),
            "a hook that only reads": lambda model: model.lm_head.register_forward_hook(Reading()),
            "the same method": lambda model: setattr(
                model, "forward", MethodType(type(model).forward, model)
            ),
            "gradient checkpointing": lambda model: (
                model.gradient_checkpointing_enable(),
                model.gradient_checkpointing_disable(),
            ),
        }.items(),
        ids=lambda change: change[0],
    )
    def test_what_is_set_anew_for_each_call_is_the_state_of_the_last(self, llama, change):
        model = copy.deepcopy(llama)
        facts = []
        for _ in range(2):
            change[1](model)
            facts.append(facts_about_state(model))
            model.lm_head._forward_hooks.clear()
        assert facts[0] is facts[1]

    def test_a_patched_class_is_another_state(self, llama, monkeypatch):
        facts_about_state(llama)["a fact"] = 1
        with monkeypatch.context() as patch:
            patch.setattr(type(llama.model.norm), "forward", lambda self, states: states)
            assert "a fact" not in facts_about_state(llama)
        assert facts_about_state(llama).pop("a fact") == 1

    def test_a_hook_on_all_modules_is_another_state(self, llama):
        facts_about_state(llama)["a fact"] = 1
        handle = torch.nn.modules.module.register_module_forward_hook(ends_with_zero)
        assert "a fact" not in facts_about_state(llama)
        handle.remove()
        assert facts_about_state(llama).pop("a fact") == 1

    def test_autocast_is_another_state(self, llama):
        facts_about_state(llama)["a fact"] = 1
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert "a fact" not in facts_about_state(llama)
        assert facts_about_state(llama)["a fact"] == 1
        del facts_about_state(llama)["a fact"]

    def test_hooks_of_all_modules_are_another_state(self, llama):
        facts_about_state(llama)["a fact"] = 1
        with torch.nn.modules.module.register_module_forward_hook(lambda *_: None):
            assert "a fact" not in facts_about_state(llama)
        del facts_about_state(llama)["a fact"]

    def test_what_was_swapped_out_is_freed(self, llama):
        import weakref

        model = copy.deepcopy(llama)
        facts_about_state(model)
        old = weakref.ref(model.lm_head)
        with contextlib.suppress(AttributeError):
            model.lm_head = torch.nn.Linear(32, 97, bias=False)
        assert old() is None
