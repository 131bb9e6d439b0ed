"""Weights in int8: those of libraries whose layout is read, and what is left to them."""

import copy

import pytest
import torch
from torch.nn.functional import linear
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from hf_refspec.kernels.pass_kernels import has_quantised_weights, int8_weight, narrow_dtype
from hf_refspec.verification.passes import run_prompts
from tests.helpers.calls import assert_lossless
from tests.helpers.drafters import Noise
from tests.helpers.products import CONFIG, counting, in_a_pass

pytestmark = pytest.mark.usefixtures("compiled")


class Int8Tensor(torch.Tensor):
    """A stand-in with the public attributes of torchao's."""

    act_quant_kwargs = None
    act_pre_scale = None
    zero_point = None

    def __new__(cls, qdata, scale):
        weight = torch.empty(qdata.shape, dtype=scale.dtype).as_subclass(cls)
        weight.qdata, weight.scale = qdata, scale
        return weight

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is linear:
            x, weight, *bias = args
            return linear(x, weight.qdata * weight.scale, *bias)
        return super().__torch_function__(function, types, args, kwargs)


Int8Tensor.__module__ = "torchao.stand_in"


def stand_in(layer):
    scale = layer.weight.abs().amax(dim=1, keepdim=True) / 127
    numbers = (layer.weight / scale).round().to(torch.int8)
    layer._parameters["weight"] = Int8Tensor(numbers, scale)  # a parameter would be a copy
    return layer


def with_zero_point(layer, value=0):
    """As torchao's of 0.18 has: zeros where the range is symmetric."""
    weight = stand_in(layer).weight
    weight.zero_point = torch.full_like(weight.scale, value, dtype=torch.int8)
    return layer


def shifted(layer):
    return with_zero_point(layer, value=3)


def by_torchao(layer, name="Int8WeightOnlyConfig", **options):
    reason = "torchao is not installed"
    quantization = pytest.importorskip("torchao.quantization", reason=reason)
    quantization.quantize_(layer, getattr(quantization, name)(**options))
    return layer


def by_quanto(layer):
    quanto = pytest.importorskip("optimum.quanto", reason="optimum-quanto is not installed")
    layers = torch.nn.Sequential(layer)
    quanto.quantize(layers, weights=quanto.qint8)
    quanto.freeze(layers)
    return layers[0]


def layer_and_tokens(quantise, tokens=4, bias=True):
    torch.manual_seed(tokens)
    layer = quantise(torch.nn.Linear(64, 50, bias=bias))
    return layer, torch.randn(1, tokens, 64)


@pytest.mark.parametrize("quantise", [stand_in, with_zero_point, by_torchao, by_quanto])
@pytest.mark.parametrize("tokens", [1, 2, 7, 32])
@pytest.mark.parametrize("bias", [False, True])
def test_one_to_32_tokens_are_sent_and_differ_by_rounding_alone(quantise, tokens, bias):
    layer, x = layer_and_tokens(quantise, tokens, bias)
    wanted = layer(x)
    y, sent = in_a_pass(layer, x, quantised=True)
    assert sent == 1
    assert y.shape == wanted.shape and y.dtype == wanted.dtype
    torch.testing.assert_close(y, wanted)
    numbers, scale = int8_weight(layer.weight)
    exact = linear(x.double(), numbers.double() * scale, layer.bias.double() if bias else None)
    assert (y - exact).norm() <= 1e-6 * exact.norm()


def dynamic(layer):
    return by_torchao(layer, "Int8DynamicActivationInt8WeightConfig")


def scaled_by_group(layer):
    from torchao.quantization.granularity import PerGroup

    return by_torchao(layer, granularity=PerGroup(32))


def in_bfloat16(layer):
    return stand_in(layer.to(torch.bfloat16))


@pytest.mark.parametrize("quantise", [dynamic, scaled_by_group, in_bfloat16, shifted])
def test_what_a_library_computes_otherwise_is_left_to_it(quantise):
    if quantise in (dynamic, scaled_by_group):
        pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    layer, x = layer_and_tokens(quantise)
    x = x.to(layer.bias.dtype)
    wanted = layer(x)
    y, sent = in_a_pass(layer, x, quantised=True)
    assert sent == 0
    assert torch.equal(y, wanted)


def test_a_model_says_whether_the_kernel_reads_its_weights():
    model = LlamaForCausalLM(CONFIG)
    assert narrow_dtype(model) == torch.float32
    assert "float64" in narrow_dtype(copy.deepcopy(model).double())
    assert "on meta" in narrow_dtype(copy.deepcopy(model).to("meta"))
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            stand_in(module)
    assert narrow_dtype(model) == torch.int8
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            module.weight.act_quant_kwargs = {"granularity": "row"}
    assert "most weights are Int8Tensor" in narrow_dtype(model)


def test_passes_and_short_prompts_of_a_quantised_model_are_sent():
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=97, num_attention_heads=2, **sizes)).eval()
    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear):
            stand_in(layer)
    assert has_quantised_weights(model)
    prompt = torch.arange(5, 25)[None]
    with torch.no_grad(), counting() as sent:
        run_prompts(model, prompt, GenerationConfig(), {"use_cache": True}, rounds=True)
        assert sent.total() == 8  # four of attention, three after it, and the output layer
        assert_lossless(model, Noise(), {"input_ids": prompt})
    assert sent.total() > 8
