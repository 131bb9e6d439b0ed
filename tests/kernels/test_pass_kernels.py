"""Which products the kernel for narrow products computes, and attention without cuDNN on a GPU."""

import copy
import subprocess
import sys
import threading
from functools import partial

import pytest
import torch
from torch.autograd import forward_ad
from torch.backends import cuda
from torch.nn.functional import linear
from torch.overrides import BaseTorchFunctionMode
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from hf_refspec.kernels import narrow_product as kernel
from hf_refspec.kernels import pass_kernels as products
from hf_refspec.kernels.narrow_product import narrow_product
from hf_refspec.kernels.pass_kernels import pass_kernels
from tests.helpers.products import HERE, counting, exact, in_a_pass, operands

ELSEWHERE = copy.deepcopy(HERE).to("meta")  # as far from a CPU as a GPU is

INNER, OUTER = 64, 50


pytestmark = pytest.mark.usefixtures("compiled")


@pytest.mark.parametrize("dtype", products.DTYPES)
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 8, 31, 32])
@pytest.mark.parametrize("with_bias", [False, True])
def test_up_to_32_tokens_are_sent_and_differ_by_rounding_alone(dtype, tokens, with_bias):
    numbers = operands(dtype, tokens)[: 2 + with_bias]
    y, sent = in_a_pass(linear, *numbers)
    assert sent == (dtype == torch.float32 or tokens > 1)
    assert y.dtype == dtype
    torch.testing.assert_close(y, exact(*numbers).to(dtype))


@pytest.mark.parametrize(("seconds", "faster"), [(1.0, "kernel"), (3.0, "torch")])
def test_on_matrix_units_the_faster_of_the_first_products_computes_the_others(
    monkeypatch, seconds, faster
):
    """By a clock on which torch takes two seconds for each."""
    clock = [0.0]
    monkeypatch.setattr(products, "perf_counter", lambda: clock[0])

    def computed(name, seconds):
        clock[0] += seconds
        return name

    race = products.Race()
    sides = partial(computed, "torch", 2.0), partial(computed, "kernel", seconds)
    assert race.product(*sides, size=100) == "kernel"  # too small to be timed
    runs = [race.product(*sides, size=1 << 20) for _ in range(40)]
    assert runs[:6] == ["torch", "kernel"] * 3
    assert set(runs[30:]) == {faster}
    assert race.product(*sides, size=100) == faster


def test_products_in_a_race_differ_by_rounding_alone(monkeypatch):
    monkeypatch.setattr(kernel, "MATRIX_UNITS", True)
    monkeypatch.setattr(products, "_RACES", [products.Race() for _ in range(33)])
    numbers = operands(torch.bfloat16, inner=1024, outer=1024)
    wanted = exact(*numbers).bfloat16()
    with counting() as sent, pass_kernels(HERE, False):
        for _ in range(30):
            torch.testing.assert_close(linear(*numbers), wanted)
    assert 12 <= sent.total() <= 18
    assert in_a_pass(linear, *(each.float() for each in numbers))[1] == 1


class Doubled(TorchDispatchMode):
    """Doubles the results of products."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        return 2 * result if "mm" in str(operation) else result


def wrapped(weight):
    class Sharded(torch.Tensor):
        pass

    return weight.as_subclass(Sharded)


LEFT_TO_TORCH = {
    "one token in bfloat16": lambda *numbers: [part.bfloat16() for part in operands(tokens=1)],
    "33 tokens": lambda x, weight, bias: (x.expand(33, 4, INNER)[:, 0].clone(), weight, bias),
    "no token": lambda x, weight, bias: (x[:, :0], weight, bias),
    "float16": lambda x, weight, bias: (x.half(), weight.half(), bias.half()),
    "float64": lambda x, weight, bias: (x.double(), weight.double(), bias.double()),
    "meta": lambda x, weight, bias: (x.to("meta"), weight.to("meta"), bias.to("meta")),
    "a subclass": lambda x, weight, bias: (x, wrapped(weight), bias),
    "a sparse weight": lambda x, weight, bias: (x[0], weight.to_sparse_csr(), None),
    "a weight of other strides": lambda x, weight, bias: (x, weight.T.contiguous().T, bias),
    "a negated view": lambda x, weight, bias: (torch._neg_view(x), weight, bias),
    "a functional tensor": lambda x, weight, bias: (torch._to_functional_tensor(x), weight, bias),
    "zeros without memory": lambda x, weight, bias: (x, torch._efficientzerotensor((9, 64)), None),
    "tokens of other strides": lambda x, weight, bias: (x.repeat(1, 2, 1)[:, ::2], weight, bias),
    "an odd inner size": lambda x, weight, bias: operands(inner=INNER - 4),
    "few outer features": lambda x, weight, bias: operands(outer=kernel.ROWS - 1),
}


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("name", LEFT_TO_TORCH)
def test_what_is_not_plain_and_narrow_is_left_to_torch(name, quantised):
    arguments = LEFT_TO_TORCH[name](*operands())
    wanted = linear(*arguments)
    y, sent = in_a_pass(linear, *arguments, quantised=quantised)
    assert sent == 0
    assert type(y) is type(wanted)
    assert y.is_meta or torch.equal(y, wanted)


def tangent(product, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(product(forward_ad.make_dual(x, x))).tangent


TRANSFORMED = {
    "vmap": lambda product, x: torch.vmap(product)(x),
    "vmap of others": lambda product, x: torch.vmap(lambda number: product(x) + number)(x[0, 0]),
    "jvp": lambda product, x: torch.func.jvp(product, (x,), (x,))[1],
    "grad": lambda product, x: torch.func.grad(lambda x: product(x).sum())(x),
    "functionalize": lambda product, x: torch.func.functionalize(product)(x),
    "a tangent": tangent,
    "compiled": lambda product, x: torch.compile(product, backend="aot_eager", fullgraph=True)(x),
}


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("name", TRANSFORMED)
def test_transformed_and_recorded_functions_are_left_to_torch(name, quantised):
    x, weight, bias = operands()
    arguments = lambda x: linear(x, weight, bias), x
    wanted = TRANSFORMED[name](*arguments)
    torch.compiler.reset()
    y, sent = in_a_pass(TRANSFORMED[name], *arguments, quantised=quantised)
    assert sent == 0
    assert torch.equal(y, wanted)


@pytest.mark.parametrize("quantised", [False, True])
def test_a_trace_in_a_pass_records_torchs_product(quantised):
    x, weight, bias = operands()

    def product(x):
        return linear(x, weight, bias)

    traced, sent = in_a_pass(
        lambda x: torch.jit.trace(product, (x,), check_trace=False), x, quantised=quantised
    )
    assert sent == 0 and "aten::linear" in str(traced.graph)
    assert torch.equal(traced(x), product(x))


def test_recorded_layers_are_sent_when_they_run():
    x, weight, bias = operands()
    traced = torch.jit.trace(lambda x: linear(x, weight, bias), (x,), check_trace=False)
    y, sent = in_a_pass(traced, x)
    assert sent == 1
    torch.testing.assert_close(y, exact(x, weight, bias).float())


@pytest.mark.parametrize(
    "around", [BaseTorchFunctionMode, Doubled, partial(FlopCounterMode, display=False), profile]
)
def test_the_modes_and_profilers_of_others_miss_no_product(around):
    with around() as outer:
        assert in_a_pass(linear, *operands())[1] == 0
    if isinstance(outer, FlopCounterMode):
        assert outer.get_total_flops() == 2 * 4 * INNER * OUTER
    if isinstance(outer, profile):
        assert "aten::linear" in {event.key for event in outer.key_averages()}


def test_a_mode_within_a_layer_sees_its_product():
    with counting() as sent, pass_kernels(HERE, False), Doubled():
        doubled = linear(*operands())
    assert not sent and torch.equal(doubled, 2 * linear(*operands()))


def test_a_default_device_is_no_mode_of_others():
    with torch.device("cpu"):
        assert in_a_pass(linear, *operands())[1] == 1


def test_gradients_autocast_and_quantised_layers_are_left_to_torch():
    x, weight, bias = operands()
    layer = torch.nn.Sequential(torch.nn.Linear(INNER, OUTER))
    quantised = torch.ao.quantization.quantize_dynamic(layer, dtype=torch.qint8)
    with counting() as sent, pass_kernels(HERE, False):
        quantised(x)
        with torch.enable_grad():
            layer(x).sum().backward()
        with torch.autocast("cpu", torch.bfloat16):
            assert linear(x, weight, bias).dtype == torch.bfloat16
    assert not sent
    assert layer[0].weight.grad is not None


def test_wrong_shapes_and_types_raise_what_torch_raises():
    x, weight, bias = operands()
    for arguments in [(x[..., :32], weight), (x, weight, bias[:-1]), (x, weight.bfloat16())]:
        with pytest.raises(RuntimeError) as plain:
            linear(*arguments)
        with pass_kernels(HERE, False), pytest.raises(RuntimeError) as narrow:
            linear(*arguments)
        assert str(narrow.value) == str(plain.value)


def test_other_threads_and_calls_afterwards_see_nothing():
    x, weight, bias = operands()
    wanted = linear(x, weight, bias)
    seen = []
    with counting() as sent, pass_kernels(HERE, False):
        thread = threading.Thread(target=lambda: seen.append(linear(x, weight, bias)))
        thread.start()
        thread.join()
    seen.append(linear(x, weight, bias))
    assert not sent
    assert all(torch.equal(y, wanted) for y in seen)


def test_hooks_run_and_may_replace_the_output():
    x = operands()[0]
    layer = torch.nn.Linear(INNER, OUTER)
    layer.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,))
    layer.register_forward_hook(lambda module, inputs, output: output + 1)
    wanted = layer(x)
    y, sent = in_a_pass(layer, x)
    assert sent == 1
    torch.testing.assert_close(y, wanted)


def test_one_environment_variable_turns_it_off(monkeypatch):
    monkeypatch.setenv("HF_REFSPEC_NARROW_PRODUCTS", "0")
    assert in_a_pass(linear, *operands())[1] == 0


def test_until_the_kernel_is_compiled_torch_computes(monkeypatch):
    monkeypatch.setattr(narrow_product, "_compiled", None)
    assert in_a_pass(linear, *operands())[1] == 0
    assert narrow_product.address is None


def test_a_linear_that_another_library_has_registered_computes_all():
    x, weight, bias = operands()
    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("linear", lambda x, weight, bias=None: x + 1, "CPU")
        y, sent = in_a_pass(linear, x, weight, bias)
    finally:
        library._destroy()
    assert sent == 0 and torch.equal(y, x + 1)
    assert in_a_pass(linear, x, weight, bias)[1] == 1


RIVAL = """
import torch
rival = torch._C._dispatch_library("IMPL", "_", "TESTING_ONLY_GenericMode")
rival.fallback_fallthrough()
from hf_refspec.kernels.pass_kernels import why_inactive
print(why_inactive())
"""


@pytest.mark.nightly
def test_where_another_library_has_the_key_torch_computes():
    done = subprocess.run([sys.executable, "-c", RIVAL], capture_output=True, text=True, check=True)
    assert "another library uses the key" in done.stdout


def test_an_interrupted_pass_leaves_nothing_behind():
    numbers = operands()
    with pytest.raises(KeyboardInterrupt), pass_kernels(HERE, False):
        raise KeyboardInterrupt
    abandoned = pass_kernels(HERE, False)
    abandoned.__enter__()
    del abandoned  # as by an exception before the body
    with counting() as sent:
        linear(*numbers)
    assert not sent


@pytest.mark.parametrize("enabled", [True, False])
def test_the_setting_is_back_after_the_last_of_several_passes(enabled):
    before = cuda.cudnn_sdp_enabled()
    cuda.enable_cudnn_sdp(enabled)
    seen = []
    first_inside = threading.Event()
    second_ended = threading.Event()

    def another_call():
        first_inside.wait()
        with pass_kernels(ELSEWHERE, False):
            seen.append(cuda.cudnn_sdp_enabled())
        second_ended.set()

    thread = threading.Thread(target=another_call)
    thread.start()
    try:
        with pytest.raises(ZeroDivisionError), pass_kernels(ELSEWHERE, False):
            first_inside.set()
            second_ended.wait()
            seen.append(cuda.cudnn_sdp_enabled())
            raise ZeroDivisionError
        assert seen == [False, False] and cuda.cudnn_sdp_enabled() == enabled
    finally:
        thread.join()
        cuda.enable_cudnn_sdp(before)


def test_passes_on_a_cpu_and_compiled_ones_keep_the_setting(monkeypatch):
    assert cuda.cudnn_sdp_enabled()
    with pass_kernels(HERE, False):
        assert cuda.cudnn_sdp_enabled()
    monkeypatch.setattr(ELSEWHERE, "_compiled_call_impl", HERE.forward)
    with pass_kernels(ELSEWHERE, False):
        assert cuda.cudnn_sdp_enabled()
