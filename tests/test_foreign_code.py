"""Calls through code of others inside a forward pass decode plainly, unless the user trusts it."""

import ast
import copy
import functools
import gc
import importlib
import itertools
import threading
from functools import partial
from types import MethodType

import accelerate
import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from transformers import AttentionInterface, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama import modeling_llama

import hf_refspec as rs
from hf_refspec import foreign_code
from tests.helpers.calls import Call, assert_lossless


class Steering:
    """Adds to the last position of each pass, with a strength that is set outside."""

    strength = 0.0

    def __call__(self, module, args, output):
        hidden = output[0] if isinstance(output, tuple) else output
        hidden[:, -1] += self.strength
        return output

    method = __call__


def observe(*_):
    pass


def attend_anew(module, *args, **kwargs):
    return sdpa_attention_forward(module, *args, **kwargs)


class Wrapped(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, *args, **kwargs):
        return self.layer(*args, **kwargs)


def replace_forward(layer, decorated):
    usual = type(layer).forward

    def forward(self, *args, **kwargs):
        return usual(self, *args, **kwargs)

    layer.forward = MethodType(decorated(forward), layer)


def wrap_layer(model):
    model.model.layers[0] = Wrapped(model.model.layers[0])


def attend_by(model):
    AttentionInterface.register("anew", attend_anew)
    model.set_attn_implementation("anew")


LAYER = "`model.layers.0` has"
# What somebody does to a model, and what the reason names.
FOREIGN = {
    "hook": (
        lambda model: model.model.layers[0].register_forward_hook(Steering()),
        f"{LAYER} the forward hook `Steering` of tests",
    ),
    "method": (
        lambda model: model.model.layers[0].register_forward_hook(Steering().method),
        f"{LAYER} the forward hook `Steering.__call__`",
    ),
    "partial": (
        lambda model: model.model.layers[0].register_forward_hook(partial(observe, 1)),
        f"{LAYER} the forward hook `observe`",
    ),
    "observing pre-hook": (
        lambda model: model.register_forward_pre_hook(observe),
        "the model has the forward pre-hook `observe`",
    ),
    "forward": (
        lambda model: replace_forward(model.model.layers[0], lambda forward: forward),
        f"{LAYER} the replaced forward `replace_forward.<locals>.forward`",
    ),
    "forward, decorated": (
        lambda model: replace_forward(model.model.layers[0], torch.no_grad()),
        f"{LAYER} the replaced forward `replace_forward.<locals>.forward`",
    ),
    "forward, disguised": (
        lambda model: replace_forward(
            model.model.layers[0], functools.wraps(type(model.model.layers[0]).forward)
        ),
        f"{LAYER} the replaced forward `LlamaDecoderLayer.forward`",
    ),
    "module": (wrap_layer, f"{LAYER} been replaced by the module `Wrapped`"),
    "accelerate's hook": (
        lambda model: add_hook_to_module(model.model.layers[0], type("Own", (ModelHook,), {})()),
        f"{LAYER} accelerate's hook `Own`",
    ),
    "attention": (attend_by, "attends by the function `attend_anew`"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_code_of_others_is_named_and_the_call_decodes_plainly(fresh_llama, kind):
    change, named = FOREIGN[kind]
    change(fresh_llama)
    stats = assert_lossless(fresh_llama, 1.0)
    assert stats.drafted == stats.probe_passes == 0
    assert named in stats.reason and '`verification="tree"`' in stats.reason


def test_a_hook_that_is_switched_on_after_the_first_call(fresh_llama):
    steering = Steering()
    fresh_llama.model.layers[0].register_forward_hook(steering)
    for steering.strength in (0.0, 3.0):
        for drafter in (1.0, "auto"):
            assert_lossless(fresh_llama, drafter)


@pytest.mark.parametrize("verification", ["tree", "chain"])
def test_a_user_who_names_the_verification_trusts_the_code(fresh_llama, verification):
    fresh_llama.model.layers[0].register_forward_hook(observe)
    stats = assert_lossless(fresh_llama, 1.0, verification=verification)
    assert stats.accepted > 0 and stats.verification == verification


def test_a_transformers_candidate_generator_is_no_word_of_the_user(fresh_llama):
    from transformers.generation import PromptLookupCandidateGenerator

    fresh_llama.register_forward_hook(observe)
    generator = PromptLookupCandidateGenerator(max_length=99)
    Call(fresh_llama, rows=1).assert_lossless(drafter=rs.ReferenceCopy() | generator)
    plain = Call(fresh_llama, rows=1)
    assert plain.generate(candidate_generator=generator).equal(plain.plain)


def test_a_global_hook(llama):
    with register_module_forward_hook(observe):
        assert "global forward hook `observe`" in assert_lossless(llama, 1.0).reason
    assert assert_lossless(llama, 1.0).accepted > 0


def test_another_function_in_the_place_of_torchs_attention(llama, monkeypatch):
    usual = nn.functional.scaled_dot_product_attention
    replaced = functools.wraps(usual)(lambda *args, **kwargs: usual(*args, **kwargs))
    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", replaced)
    named = "torch has in the place of its `scaled_dot_product_attention` the function"
    assert named in assert_lossless(llama, 1.0).reason


def test_another_method_of_transformers_caches(llama, monkeypatch):
    usual = DynamicLayer.update
    replaced = functools.wraps(usual)(lambda *args, **kwargs: usual(*args, **kwargs))
    monkeypatch.setattr(DynamicLayer, "update", replaced)
    named = "`DynamicLayer` has in the place of its `update` the function"
    assert named in assert_lossless(llama, 1.0).reason


def halved_in_longer_passes(function):
    """Calls a function, and halves what it returns where a pass has several tokens."""

    def halved(*args, **kwargs):
        result = function(*args, **kwargs)
        first = result[0] if isinstance(result, tuple) else result
        many = first.shape[-2] > 1
        return tuple(x / (1 + many) for x in result) if first is not result else first / (1 + many)

    return halved


@pytest.mark.parametrize(
    ("place", "name"),
    [
        (modeling_llama, "apply_rotary_pos_emb"),
        (modeling_llama.LlamaDecoderLayer, "__call__"),
        (nn.functional, "linear"),
    ],
)
def test_functions_of_others_in_the_place_of_the_models_own(llama, monkeypatch, place, name):
    assert assert_lossless(llama, 1.0).accepted > 0
    monkeypatch.setattr(place, name, halved_in_longer_passes(getattr(place, name)))
    assert (
        "`halved_in_longer_passes.<locals>.halved` of tests" in assert_lossless(llama, 1.0).reason
    )


def test_what_is_called_like_a_function_in_the_place_of_one(llama, monkeypatch):
    called = functools.partial(halved_in_longer_passes(modeling_llama.apply_rotary_pos_emb))
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", called)
    reason = assert_lossless(llama, 1.0).reason
    assert "has in the place of its `apply_rotary_pos_emb` the function" in reason


def test_an_imported_function_with_a_fallback_is_the_modules_own(
    fresh_llama, monkeypatch, tmp_path
):
    """As models have for packages that may be missing."""
    (tmp_path / "fast_rotary.py").write_text("def rotate_half(x): return x\n")
    (tmp_path / "modeling_of_mine.py").write_text(
        "from transformers import LlamaForCausalLM\n"
        "try:\n    from fast_rotary import rotate_half\n"
        "except ImportError:\n    def rotate_half(x): return x\n"
        "class MyLlama(LlamaForCausalLM): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    fresh_llama.__class__ = importlib.import_module("modeling_of_mine").MyLlama
    assert foreign_code.foreign_code(fresh_llama) is None


def test_another_thread_may_read_python_meanwhile(llama, monkeypatch):
    """Python 3.11 counts the depth of all threads' syntax trees together."""
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda *args: args[:2])
    foreign_code._defined_functions.cache_clear()
    read = []
    collections = itertools.count()

    def read_deeper(depth: int = 20) -> None:
        if depth:
            read_deeper(depth - 1)
        else:
            read.append(ast.parse("1 + 1"))

    def in_a_thread(phase: str, _) -> None:
        if phase == "start" and next(collections) % 50 == 0:
            thread = threading.Thread(target=read_deeper)
            thread.start()
            thread.join()

    usual = gc.get_threshold()
    gc.callbacks.append(in_a_thread)
    gc.set_threshold(1)  # it collects, and another thread may run, at every object
    try:
        reason = foreign_code.foreign_code(llama)
    finally:
        gc.set_threshold(*usual)
        gc.callbacks.remove(in_a_thread)
    assert read and "apply_rotary_pos_emb" in reason


def test_reproducible_calls_refuse_it(fresh_llama):
    fresh_llama.register_forward_hook(observe)
    with pytest.raises(ValueError, match="`observe`"):
        assert_lossless(fresh_llama, 1.0, verification="reproducible")


def test_running_batches_and_attached_drafters_decode_plainly(fresh_llama):
    fresh_llama.model.layers[0].register_forward_hook(Steering())
    call = Call(fresh_llama, rows=1)
    batch = rs.RunningBatch(fresh_llama)
    text = batch.add(**call.options)
    while len(batch):
        batch.step()
    with rs.attach(fresh_llama, rs.ReferenceCopy()) as attachment:
        assert call.generate().equal(call.plain)
    assert text.sequences.equal(call.plain)
    assert text.stats.drafted == attachment.stats.drafted == 0


def accelerated(model):
    return accelerate.cpu_offload(model, execution_device="cpu")


def adapted(model):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config).eval().base_model.model


def replaced_by_its_own_class(model):
    model.forward = MethodType(type(model).forward, model)
    return model


@pytest.mark.parametrize("change", [accelerated, adapted, replaced_by_its_own_class])
def test_code_of_transformers_accelerate_and_peft_is_drafted_for(llama, change):
    assert assert_lossless(change(copy.deepcopy(llama)), 1.0).accepted > 0
