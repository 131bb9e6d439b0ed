"""A model may change between calls; what was learned about it before no longer counts."""

import copy

import pytest
import torch
from torch.nn.functional import linear, silu
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import hf_refspec as rs
from hf_refspec.transformers_names import CACHE_NAME
from hf_refspec.verification.model_memo import memo_of_state
from tests.helpers.architectures import small
from tests.helpers.calls import (
    GREEDY,
    PROMPT,
    Call,
    assert_lossless,
    assert_same_entries,
    padded_prompts,
)
from tests.helpers.drafters import Noise, Prophet
from tests.helpers.own_forward import own_forward


def check(model, drafter=0.8, **options) -> float:
    """Compares with plain decoding, and returns the MAT."""
    return assert_lossless(model, drafter, **{"max_draft_tokens": 6, **options}).mat


def steer_last_token(model):
    """Changes the last token of each pass, as if it were the only one."""

    def steer(module, args, output):
        output[:, -1] += 3.0
        return output

    return model.model.layers[0].mlp.register_forward_hook(steer)


class LargerProducts(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return 1.3 * result + 0.05 if function is linear else result


class LargerMatrices(TorchDispatchMode):
    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        return 1.3 * result if "mm" in str(operation) else result


class LastTokenLeftOut(TorchFunctionMode):
    """Changes the last token of each pass, as if it were the only one."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return result.index_fill(1, torch.tensor(-1), 0.0) if function is silu else result


@pytest.fixture
def model():
    """A model that has been probed."""
    model = small("llama")
    assert check(model) > 1.5
    return model


def test_a_steering_hook_is_seen_and_its_removal_too(model):
    handle = steer_last_token(model)
    assert check(model) == 1.0  # no pass over several tokens is like single ones
    handle.remove()
    assert check(model) > 1.5


def negate(model):
    with torch.no_grad():
        model.lm_head.weight.mul_(-1)


def scale(model):
    for layer in model.model.layers:
        layer.self_attn.scaling *= 3


def flip(model):
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.flip(0))


def switch_adapter(model):
    model.set_adapter("second")


def scale_adapter(model):
    for module in model.modules():
        if hasattr(module, "scale_layer"):
            module.scale_layer(0.2)  # writes into a dictionary


class ChangesTheModel:
    """A logits processor, criterion or streamer that changes the model when asked this often."""

    def __init__(self, change, model):
        self.change = change
        self.model = model
        self.asked = 0

    def __call__(self, input_ids, scores):
        self.put(None)
        return scores

    def put(self, value):
        self.asked += 1
        if self.asked == 6:
            self.change(self.model)

    def end(self):
        pass


class Criterion(ChangesTheModel):
    def __call__(self, input_ids, scores):
        super().__call__(input_ids, scores)
        return torch.tensor([False])


OF_ADAPTERS = [switch_adapter, scale_adapter]
MEMBERS = {
    "logits_processor": lambda *arguments: [ChangesTheModel(*arguments)],
    "stopping_criteria": lambda *arguments: [Criterion(*arguments)],
    "streamer": ChangesTheModel,
}


@pytest.mark.parametrize("change", [steer_last_token, negate, scale, flip, *OF_ADAPTERS])
@pytest.mark.parametrize("member", MEMBERS)
@pytest.mark.parametrize("verification", ["auto", "chain"])
def test_a_member_of_a_call_that_changes_the_model_ends_its_drafts(member, change, verification):
    """The draft nodes of that pass were verified by what the model was before."""
    model = small("llama")
    if change in OF_ADAPTERS:
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(target_modules="all-linear", init_lora_weights=False)
        model = peft.get_peft_model(model, config, "first").eval()
        model.add_adapter("second", config)
    changed, options = copy.deepcopy(model), {"input_ids": PROMPT, **GREEDY}
    plain = changed.generate(**options, **{member: MEMBERS[member](change, changed)})
    asked: list[int] = []  # the new tokens that were known at each draft

    class Asked(Prophet):
        def draft(self, budget, call):
            asked.append(len(self.observed))
            return super().draft(budget, call)

    drafter = Asked(plain, 1.0)
    options |= {"candidate_generator": drafter, "max_draft_tokens": 8, "verification": verification}
    options[member] = MEMBERS[member](change, model)
    assert model.generate(**options).tolist() == plain.tolist()
    assert 0 < drafter.stats.accepted < 6
    assert "changed the model in the middle of the call" in drafter.stats.reason
    assert max(asked) < 6  # no draft is asked for afterwards


@pytest.mark.parametrize("drafter", [0.9, "auto", rs.TokenRecycling()])
def test_a_head_that_is_larger_than_configured_emits_ids_that_are_drafted(drafter):
    model = small("llama")
    model.config.vocab_size = 40
    for _ in range(2):
        assert_lossless(model, drafter, {"input_ids": PROMPT % 40})
    assert_lossless(model, rs.TokenRecycling(), padded_prompts(3))


@pytest.mark.parametrize("lost", [slice(0, 1), slice(1, 3), slice(3, None)])
@pytest.mark.parametrize("model_type", ["llama", "mistral"])
def test_a_model_that_has_lost_layers_is_drafted_for(model_type, lost):
    """Its cache has layers, by its configuration, that nothing writes."""
    model = small(model_type, num_hidden_layers=5)
    for _ in range(2):
        assert check(model) > 1.5
        options = {**GREEDY, "return_dict_in_generate": True}
        plain = model.generate(PROMPT, **options)
        drafted = model.generate(PROMPT, **options, candidate_generator=Noise())
        assert_same_entries(plain[CACHE_NAME], drafted[CACHE_NAME], torch.ones_like(PROMPT))
        if len(model.model.layers) == 5:
            del model.model.layers[lost]


@pytest.mark.parametrize("mode", [LargerProducts, LargerMatrices])
def test_a_mode_around_a_call_sees_all_products_of_its_passes(model, mode):
    with mode():
        assert check(model) > 1.5
    assert check(model) > 1.5


def test_a_model_is_probed_again_inside_of_a_mode_and_not_after_it(model):
    with LastTokenLeftOut():
        assert check(model) == 1.0
    stats = assert_lossless(model)
    assert stats.mat > 1.5 and stats.probe_passes == 0


def test_a_number_that_forward_passes_change_is_no_setting_of_the_model(model):
    """A setting is: where it changes, the model is probed once more."""
    layer, probing_passes = model.model.layers[0], []
    layer.calls, layer.last, layer.scale = 0, "", 1.0

    def count(module, args, output):
        module.calls, module.last = module.calls + 1, str(output.shape)
        return output * module.scale

    layer.register_forward_hook(count)
    passes = []
    own_forward(model, lambda usual, **kwargs: passes.append(1) or usual(**kwargs))
    for scale in (1.0, 1.0, 1.0, 1.01, 1.01, 1.0):
        layer.scale = scale
        passes.clear()
        stats = assert_lossless(model, verification="tree")
        assert stats.mat > 1.5
        assert stats.probe_passes == len(passes) - 24 - stats.forward_passes
        probing_passes.append(stats.probe_passes)
    assert probing_passes == [9, 0, 0, 9, 0, 0]


@pytest.mark.parametrize("use_cache", [True, False])
def test_layers_quantised_in_place_are_seen(model, use_cache):
    """Activations are scaled by all tokens of a pass, which differs from the last one's."""
    torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, inplace=True)
    assert check(model) == 1.0
    model.generation_config.use_cache = use_cache
    for nodes in (0, 8):
        assert_lossless(model, "auto", max_draft_tokens=nodes)


@pytest.mark.parametrize("offload", ["cpu", "disk"])
def test_offloaded_weights_are_drafted_for(offload, tmp_path):
    """They are loaded for each pass, so that a saved pass saves a transfer."""
    accelerate = pytest.importorskip("accelerate")
    model = small("llama")
    before = check(model)
    if offload == "cpu":
        accelerate.cpu_offload(model, execution_device="cpu")
    else:
        accelerate.disk_offload(model, tmp_path, execution_device="cpu")
    assert check(model) == before
    memo_of_state(model)["a fact"] = 1
    check(model)
    assert "a fact" in memo_of_state(model)  # new tensors at every pass, the same model


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("model_type", ["opt", "gpt2", "llama"])
def test_dropout_in_training_mode_is_decoded_plainly(model_type, rows, caplog):
    """Some models have dropout modules, others call a function with a rate of their own."""
    rates = ("dropout", "hidden_dropout", "hidden_dropout_prob", "resid_pdrop", "attention_dropout")
    call = Call(small(model_type, **dict.fromkeys(rates, 0.3)), rows)
    before = call.assert_lossless().mat
    call.model.train()
    stats = assert_lossless(call.model, Noise(), call.inputs)
    assert stats.mat == 1.0 and stats.reason.startswith("dropout is at work in training mode")
    assert "call `model.eval()`" in caplog.text
    call.model.eval()
    assert call.assert_lossless().mat == before > 1.2


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("part", [None, "transformer.h.0"])
def test_dropout_in_the_passes_of_a_logits_processor_draws_the_same_numbers(part, do_sample):
    model = small("gpt2", resid_pdrop=0.3)
    model.get_submodule(part or "").train()
    options = {"guidance_scale": 1.5, "do_sample": do_sample}
    stats = assert_lossless(model, Noise(), **options)
    assert stats.reason.startswith("dropout is at work in training mode")
    model.eval()
    assert assert_lossless(model, **options).mat > 1.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_little_dropout_is_found_by_the_random_numbers_it_draws(model, dtype):
    """Too little to change a logit beyond rounding."""
    model.to(dtype).train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 1e-3
    assert check(model) == 1.0


def test_a_probe_leaves_random_numbers_alone(model):
    def noisy(usual, **kwargs):
        outputs = usual(**kwargs)
        outputs.logits += 1e-2 * torch.randn_like(outputs.logits)
        return outputs

    own_forward(model, noisy)
    stats = assert_lossless(model)
    assert stats.mat == 1.0 and stats.probe_passes > 0


def test_a_model_that_fails_under_autocast_is_probed_again_without():
    model = small("llama")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model.generate(PROMPT, candidate_generator="auto", max_draft_tokens=6, **GREEDY)
    assert check(model) > 1.5


def test_a_probe_keeps_a_state_that_the_models_modules_hold():
    """RecurrentGemma's, which no cache has."""
    texts = []
    for drafter in (None, "auto"):
        model = small("recurrent_gemma")
        first = model.generate(PROMPT, return_dict_in_generate=True, **GREEDY)
        options = {"past_key_values": first.past_key_values, "candidate_generator": drafter}
        try:
            texts.append(model.generate(first.sequences, **options, **GREEDY).tolist())
        except RuntimeError as error:
            if drafter is not None:
                raise
            pytest.skip(f"this transformers cannot decode it plainly: {error}")
    assert texts[0] == texts[1]
