"""Findings about a model are kept beside it, for as long as it lives."""

import copy
import gc
import pickle
import weakref
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MethodType
from unittest import mock

import peft
import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook
from transformers import AutoModelForCausalLM

import hf_refspec as rs
from hf_refspec.verification.model_memo import memo_of, memo_of_state
from tests.helpers.calls import GREEDY, PROMPT, assert_lossless
from tests.helpers.drafters import Noise


@pytest.fixture
def model(fresh_llama):
    """A model about which something is known."""
    fresh_llama.generate(PROMPT, candidate_generator=Noise(), **GREEDY)
    assert memo_of(fresh_llama)
    return fresh_llama


def test_each_model_has_a_memo_of_its_own(model, llama):
    memo = memo_of(model)
    assert memo_of(model) is memo
    assert memo_of(llama) is not memo
    memo["a fact"] = 1
    assert "a fact" not in memo_of(llama)


def pickled(model):
    content = pickle.dumps(model)
    assert b"hf_refspec." not in content  # it may be opened without this package
    return pickle.loads(content)


def saved(model):
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        assert "refspec" not in (Path(folder) / "config.json").read_text()
        return AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("twin_of", [copy.deepcopy, pickled, saved])
def test_a_twin_starts_with_an_empty_memo(model, twin_of):
    """It may be changed: another dtype, other weights, a mask that is ignored."""
    before = dict(memo_of(model))
    twin = twin_of(model)
    assert not memo_of(twin)
    assert assert_lossless(twin, 1.0, max_draft_tokens=4).mat > 1.5
    assert memo_of(twin).keys() & before.keys()
    assert dict(memo_of(model)) == before


@pytest.mark.parametrize("drafter", ["auto", "named"])
def test_a_call_leaves_no_trace_in_the_model(fresh_llama, drafter):
    def attributes():
        return [(name, vars(module).keys()) for name, module in fresh_llama.named_modules()]

    before, content = attributes(), pickle.dumps(fresh_llama)
    generator = drafter if drafter == "auto" else rs.ReferenceCopy() | rs.TokenRecycling()
    fresh_llama.generate(PROMPT, candidate_generator=generator, **GREEDY)
    assert attributes() == before and pickle.dumps(fresh_llama) == content


@pytest.mark.parametrize("drafter", ["auto", Noise()])
def test_a_model_that_was_drafted_for_is_freed(llama, drafter):
    model = copy.deepcopy(llama)
    model.generate(PROMPT, candidate_generator=drafter, **GREEDY)
    freed = weakref.ref(model)
    assert memo_of(model)
    del model
    gc.collect()
    assert freed() is None


# --- a memo of the model's present state: found again where nothing has changed, and only there


def ends_with_zero(module, args, output):
    output[:, -1] = 0.0


class Reading:
    only_reads = True

    def __call__(self, module, args, output):
        pass


def attention_of(model):
    return model.model.layers[0].self_attn


CHANGES = {
    "training mode": lambda model: model.model.layers[0].train(),
    "a rate of dropout": lambda model: setattr(attention_of(model), "attention_dropout", 0.5),
    "a hook": lambda model: model.lm_head.register_forward_hook(ends_with_zero),
    "a weight of another type": lambda model: model.lm_head.half(),
    "a new weight": lambda model: setattr(
        model.lm_head, "weight", torch.nn.Parameter(model.lm_head.weight.data)
    ),
    "another attention": lambda model: model.set_attn_implementation("eager"),
    "a configuration": lambda model: setattr(model.config, "sliding_window", 4),
    "a forward of its own": lambda model: setattr(model, "forward", model.forward),
    "a swapped module": lambda model: setattr(model, "lm_head", copy.copy(model.lm_head)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_can_change_logits_makes_another_state(fresh_llama, change):
    memo_of_state(fresh_llama)["a fact"] = 1
    assert memo_of_state(fresh_llama)["a fact"] == 1
    CHANGES[change](fresh_llama)
    assert "a fact" not in memo_of_state(fresh_llama)


WHILE = {
    "autocast": lambda _: torch.autocast("cpu", dtype=torch.bfloat16),
    "a hook on all modules": lambda _: register_module_forward_hook(ends_with_zero),
    "a patched class": lambda model: mock.patch.object(
        type(model.model.norm), "forward", lambda self, states: states
    ),
}


@pytest.mark.parametrize("changed", WHILE)
def test_while_something_changes_every_model_the_state_is_another(fresh_llama, changed):
    memo_of_state(fresh_llama)["a fact"] = 1
    with WHILE[changed](fresh_llama):
        assert "a fact" not in memo_of_state(fresh_llama)
    assert memo_of_state(fresh_llama)["a fact"] == 1


def test_adapters_that_are_switched_on_and_off_keep_theirs(fresh_llama):
    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(fresh_llama, config)
    memo_of_state(fresh_llama)["adapter"] = True
    with adapted.disable_adapter():
        assert "adapter" not in memo_of_state(fresh_llama)
        memo_of_state(fresh_llama)["adapter"] = False
    assert memo_of_state(fresh_llama)["adapter"] is True
    with adapted.disable_adapter():
        assert memo_of_state(fresh_llama)["adapter"] is False


def checkpoint_gradients(model):
    model.gradient_checkpointing_enable()
    model.gradient_checkpointing_disable()


SET_ANEW = {
    "the same hook": lambda model: model.lm_head.register_forward_hook(ends_with_zero),
    "a hook that only reads": lambda model: model.lm_head.register_forward_hook(Reading()),
    "the same method": lambda model: setattr(
        model, "forward", MethodType(type(model).forward, model)
    ),
    "gradient checkpointing": checkpoint_gradients,
}


@pytest.mark.parametrize("change", SET_ANEW)
def test_what_each_call_sets_anew_does_not_change_the_state(fresh_llama, change):
    memos = []
    for _ in range(2):
        SET_ANEW[change](fresh_llama)
        memos.append(memo_of_state(fresh_llama))
        fresh_llama.lm_head._forward_hooks.clear()
    assert memos[0] is memos[1]


def test_a_module_that_was_swapped_out_is_freed(fresh_llama):
    memo_of_state(fresh_llama)
    old = weakref.ref(fresh_llama.lm_head)
    fresh_llama.lm_head = torch.nn.Linear(32, 97, bias=False)
    assert old() is None
