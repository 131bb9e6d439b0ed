"""The kernels of a pass that is not compiled, where torch's own choice is slow.

On a CPU, calls of `torch.nn.functional.linear` go where their product is computed faster: those of
up to 32 tokens to `narrow_product.py` (weights in float32, bfloat16, or int8 with one scale for
each row), those of more tokens in float32 to oneDNN ([`wide_product`]). Where a CPU has matrix
units, a [`Race`] shows which products in bfloat16 these are; prompts in bfloat16 keep plain
decoding's bits. torch's dispatcher brings the calls here, also those of recorded layers, in threads
that run a pass. Other quantised weights and sharded ones are left to torch, and so is whatever
another mode, a profiler or a transform (`torch.vmap`) must see; hooks and adapters run as ever,
around their plain products. The model is not changed, and other threads and calls see nothing.
Attention of few tokens goes to `narrow_attention.py` where a packed pass asks for it. torch's own
threads run the kernels: torch's OpenMP library calls them.

On a GPU, attention does without cuDNN's plans.
"""

from __future__ import annotations

import ctypes
import math
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache, partial
from importlib.util import find_spec
from statistics import median
from time import perf_counter
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch._C import (
    DispatchKey,
    DispatchKeySet,
    _dispatch_has_kernel_for_dispatch_key,
    _dispatch_key_parse,
    _dispatch_keys,
    _dispatch_library,
    _dispatch_tls_local_include_set,
    _ExcludeDispatchKeyGuard,
    _IncludeDispatchKeyGuard,
)
from torch.autograd import forward_ad
from torch.backends import cuda, mkldnn
from torch.nn import Parameter
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from transformers import PreTrainedModel

from . import narrow_attention as attention
from . import narrow_product as narrow
from .kernel import Kernel
from .narrow_attention import narrow_attention
from .narrow_product import narrow_product

ORDINARY = (Tensor, Parameter)  # kinds of weights; all others are quantised or sharded
MAX_TOKENS = 32
LEAST_SLOTS = 512  # of fewer, torch's attention takes less time than the kernel's call
DTYPES = [torch.float32, torch.bfloat16]
# Of attention, which nobody has compared with torch's on matrix units.
ATTENDED = DTYPES[:1] if narrow.MATRIX_UNITS else DTYPES
# In a race each side computes this number of products, with weights of at least so many numbers: a
# smaller one takes little longer than its call.
_HEATS = 12
_LARGE = 1 << 20
# Of fewer multiplications, torch's product takes less time than oneDNN's call.
_LEAST_MULTIPLICATIONS = 1 << 22
_GAIN = 1.1  # how much faster oneDNN must be
_KINDS = {
    torch.float32: narrow.FLOAT32,
    torch.bfloat16: narrow.BFLOAT16,
    torch.int8: narrow.INT8,
}

# A key of torch's dispatcher that torch itself never includes: all operations pass over it but
# `linear`, which comes to [`_linear`] in threads that have included the key.
_KEY = _dispatch_key_parse("TESTING_ONLY_GenericMode")
_KEYS = DispatchKeySet(_KEY)
# The bits of all keys but those by which torch dispatches an operation on plain tensors in this
# process's memory. Other devices and layouts, dispatch modes, transforms, tensors that wrap others,
# and views that negate or conjugate have a bit each.
_OTHER_KEYS = ~(
    _KEYS
    | DispatchKeySet(DispatchKey.CPU)
    | DispatchKeySet(DispatchKey.ADInplaceOrView)
    | DispatchKeySet(DispatchKey.AutogradCPU)
    | DispatchKeySet(DispatchKey.AutocastCPU)
    | DispatchKeySet(DispatchKey.BackendSelect)
).raw_repr()

_ZERO = ctypes.c_int64()  # the bias of products without one

_parallel: Any = None
with suppress(AttributeError, OSError):  # torch's OpenMP library may lack GNU's interface
    _parallel = ctypes.CDLL(getattr(find_spec("torch._C"), "origin", None)).GOMP_parallel
_onednn: Any = None
if mkldnn.is_available():
    with suppress(AttributeError):  # which compiled models of torch call
        _onednn = torch.ops.mkldnn._linear_pointwise.default


Int8Weight: TypeAlias = tuple[Tensor, Tensor]  # int8 (outer, inner), and a scale for each row


# Only public attributes and methods are read. A library whose `linear` also does something else
# (int8 activations, groups within a row) is left alone.
def _of_torchao(weight: Any) -> Int8Weight | None:
    # Not every release has all of these.
    further = ("act_quant_kwargs", "act_pre_scale")
    computes_more = any(getattr(weight, name, None) is not None for name in further)
    zero_point = getattr(weight, "zero_point", None)  # all zeros where the range is symmetric
    is_shifted = zero_point is not None and bool(zero_point.any())
    return None if computes_more or is_shifted else (weight.qdata, weight.scale)


def _of_quanto(weight: Any) -> Int8Weight | None:
    parts: dict[str, Tensor] = {}
    weight.save_to_state_dict(parts, "", keep_vars=True)
    return parts["_data"], parts["_scale"]  # as its checkpoints name them


# By the package and the name of a weight's class.
_LAYOUTS: dict[tuple[str, str], Callable[[Any], Int8Weight | None]] = {
    ("torchao", "Int8Tensor"): _of_torchao,
    ("optimum", "WeightQBytesTensor"): _of_quanto,
}


def pass_kernels(
    model: PreTrainedModel, quantised: bool, is_prefill: bool = False
) -> AbstractContextManager[Any]:
    """Around a forward pass: other products on a CPU, and after a prompt attention without plans on
    a GPU. A compiled model, which decodes plainly in a running batch, is left alone. `quantised` is
    what [`has_quantised_weights`] returns."""
    if model._compiled_call_impl is not None:  # by `model.compile()`
        return nullcontext()
    if model.device.type != "cpu":
        return nullcontext() if is_prefill else _WITHOUT_PLANS
    if why_inactive() is not None:
        return nullcontext()
    return _sent_products(DTYPES[:1] if is_prefill else DTYPES, quantised)


def has_quantised_weights(model: nn.Module) -> bool:
    """True if some weight is quantised or sharded."""
    return not all(type(weight) in ORDINARY for weight in model.parameters())


def active_modes() -> list[type]:
    """The kinds of this thread's function and dispatch modes of torch, code of others around the
    operations of a pass; the outermost of each sort first. `torch.device` and
    `torch.set_default_device`, which only place new tensors, are left out."""
    modes = [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]
    return [type(mode) for mode in modes if not isinstance(mode, DeviceContext)]


def narrow_dtype(model: nn.Module) -> torch.dtype | str:
    """The type of most of a model's weights, if the kernel reads them in passes over few tokens;
    otherwise why it does not."""
    kinds: Counter[torch.dtype | str] = Counter()
    for module in model.modules():
        if not isinstance(module, nn.Embedding):
            for weight in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                if weight.ndim > 1 and weight.dtype != torch.bool:
                    kinds[_kind(weight)] += weight.numel()
    kind: torch.dtype | str = max(kinds, key=kinds.__getitem__, default="it has no weights")
    return kind if isinstance(kind, str) else why_inactive() or kind


def _kind(weight: Tensor) -> torch.dtype | str:
    if not weight.is_cpu:
        return f"the weights are on {weight.device}"
    if int8_weight(weight) is not None:
        return torch.int8
    is_plain = type(weight) in ORDINARY
    if is_plain and weight.dtype in DTYPES:
        return weight.dtype
    name = str(weight.dtype).removeprefix("torch.") if is_plain else type(weight).__name__
    if is_plain and weight.is_floating_point():
        return f"torch multiplies {name} itself on this CPU"
    return f"most weights are {name}, a form that it does not read"


def why_inactive() -> str | None:
    """Why no pass uses the kernel now; `None` if passes of some models do."""
    if os.environ.get("HF_REFSPEC_NARROW_PRODUCTS") == "0":
        return "`HF_REFSPEC_NARROW_PRODUCTS` is 0"
    if not narrow.SUPPORTED:
        return "the CPU lacks AVX2, or llvmlite is too old"
    if _parallel is None:
        return "torch was built without GNU's OpenMP"
    if not _key_is_ours:
        return "another library uses the key of torch's dispatcher that brings products to it"
    if _dispatch_has_kernel_for_dispatch_key("aten::linear", "CPU"):
        return "another library has registered a `linear` of its own with torch"
    if narrow_product.address is None:
        return "it is not compiled yet"
    if active_modes():
        return "a function or dispatch mode of torch is active, which would not see the products"
    if torch.autograd._profiler_enabled():
        return "a profiler of torch is active, which would not see the products"
    return None


def int8_weight(weight: Tensor) -> Int8Weight | None:
    """The numbers of a weight `(outer, inner)` whose product is `(x @ numbers.T) * scale`; `None`
    if it is no such weight."""
    kind = type(weight)
    read = _LAYOUTS.get((kind.__module__.partition(".")[0], kind.__qualname__))
    found = None if read is None else read(weight)
    if found is None:
        return None
    numbers, scale = found
    by_row = numbers.shape == weight.shape and scale.shape == (weight.shape[0], 1)
    return found if by_row and numbers.dtype == torch.int8 else None


class Race:
    """torch's products against the kernel's, of one number of tokens in bfloat16 on a CPU with
    matrix units.

    The CPU and this number decide which are faster. Both take turns at the first large products as
    passes bring them, whose weights come from memory; then the faster one computes all."""

    def __init__(self) -> None:
        self._seconds: tuple[list[float], list[float]] = ([], [])  # by number of the weight
        self._winner: int | None = None

    def product(
        self, by_torch: Callable[[], Tensor], by_kernel: Callable[[], Tensor], size: int
    ) -> Tensor:
        """The product with a weight of `size` numbers, by one of the two."""
        sides = by_torch, by_kernel
        if self._winner is not None or size < _LARGE:
            return sides[1 if self._winner is None else self._winner]()
        of_torch, of_kernel = self._seconds
        side = int(len(of_torch) > len(of_kernel))
        began = perf_counter()
        y = sides[side]()
        self._seconds[side].append((perf_counter() - began) / size)
        if len(of_kernel) >= _HEATS:
            self._winner = int(min(of_kernel) < min(of_torch))  # other load disturbs some
        return y


_RACES = [Race() for _ in range(1 + MAX_TOKENS)]  # by the number of tokens


class _OfThread(threading.local):
    """The types of the numbers whose products a pass of this thread sends to kernels."""

    dtypes: Sequence[torch.dtype] = ()


_of_thread = _OfThread()


@contextmanager
def _sent_products(dtypes: Sequence[torch.dtype], quantised: bool) -> Iterator[None]:
    """Sends products of numbers of these types where they are computed faster."""
    outer = _of_thread.dtypes
    _of_thread.dtypes = dtypes
    try:
        with _OfAnyWeight() if quantised else _IncludeDispatchKeyGuard(_KEY):
            yield
    finally:
        _of_thread.dtypes = outer


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear` in a pass."""
    y = _product(x, weight, bias)
    return by_torch(x, weight, bias) if y is None else y


def by_torch(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product by torch, which would bring it here again."""
    with _ExcludeDispatchKeyGuard(_KEYS):
        return torch.ops.aten.linear.default(x, weight, bias)


_key_is_ours = False
_others = _dispatch_library("IMPL", "_", "TESTING_ONLY_GenericMode")  # all other operations
_linears = torch.library.Library("aten", "IMPL")
with suppress(RuntimeError):  # another library has the key
    _others.fallback_fallthrough()
    _linears.impl("linear", _linear, "TESTING_ONLY_GenericMode")
    _key_is_ours = True


class _OfAnyWeight(TorchFunctionMode):
    """Sends products of quantised weights as well. The class of such a weight handles the call
    before torch's dispatcher does. Only a function mode comes earlier, and it costs a Python call
    for each operation of the pass."""

    def __torch_function__(
        self, function: Callable, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is linear and kwargs.keys() <= {"bias"} and not torch.compiler.is_compiling():
            product = _product(*args, **kwargs)
            if product is not None:
                return product
        return function(*args, **kwargs)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """`(x @ weight.T) * scale + bias` of `x` `(..., inner)`, a weight `(outer, inner)` and a scale
    `(outer, 1)`, if it is computed faster than by torch."""
    # Little is asked, and in few calls: this runs a hundred times a pass.
    scale = None
    if type(weight) not in ORDINARY:
        if (quantised := int8_weight(weight)) is None:
            return None
        weight, scale = quantised
    numbers = [operand for operand in (x, scale, bias) if operand is not None]
    if scale is None:
        is_plain = _are_plain([*numbers, weight], _of_thread.dtypes)
    else:
        is_plain = _are_plain(numbers, [torch.float32]) and _are_plain([weight], [torch.int8])
    if not is_plain or weight.ndim != 2:
        return None
    outer, inner = weight.shape
    count = x.numel()
    # One token in bfloat16 has plain decoding's bits.
    least = 2 if x.dtype == torch.bfloat16 else 1
    is_usual = (
        inner % narrow.INNER_MULTIPLE == 0
        and outer >= narrow.ROWS
        and x.shape[-1] == inner
        and least * inner <= count
        and (bias is None or bias.shape == (outer,))
        and all(map(Tensor.is_contiguous, (weight, *numbers)))
    )
    if not is_usual:
        return None
    if count > MAX_TOKENS * inner:
        is_wide = scale is None and x.dtype == torch.float32
        return wide_product(x, weight, bias) if is_wide else None
    if not narrow.MATRIX_UNITS or x.dtype != torch.bfloat16:
        return _computed(x, weight, scale, bias)
    sides = partial(by_torch, x, weight, bias), partial(_computed, x, weight, scale, bias)
    return _RACES[count // inner].product(*sides, weight.numel())


def _computed(x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
    """The product by the kernel."""
    outer, inner = weight.shape
    y = x.new_empty((*x.shape[:-1], outer))
    biases = ctypes.addressof(_ZERO), 0
    if bias is not None:
        biases = bias.data_ptr(), bias.element_size()
    scales = 0 if scale is None else scale.data_ptr()
    words = [  # in the order of narrow_product.py's `NEXT_ROW`, `WEIGHT`, ...
        *(0, weight.data_ptr(), scales, x.data_ptr(), y.data_ptr(), *biases),
        *(inner, outer, x.numel() // inner, _KINDS[weight.dtype]),
    ]
    _run(narrow_product, words)
    return y


def _are_plain(operands: list[Tensor], dtypes: Sequence[torch.dtype]) -> bool:
    """True if these are numbers of one type, of several that it may be, in this process's memory,
    on which nothing else (a subclass, a mode, a transform, a tracer) decides."""
    # No generators: this is asked for each product of a pass.
    keys = _dispatch_tls_local_include_set().raw_repr()
    for operand in operands:
        if type(operand) not in ORDINARY:
            return False
        keys |= _dispatch_keys(operand).raw_repr()
    dtype = operands[0].dtype
    if dtype not in dtypes or keys & _OTHER_KEYS:
        return False
    for operand in operands:
        is_offloaded = operand.data_ptr() == 0
        if is_offloaded or operand.dtype != dtype:
            return False
    return (
        forward_ad._current_level < 0  # otherwise they may have tangents
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
    )


def wide_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """`x @ weight.T + bias` of `x` `(..., inner)` and a weight `(outer, inner)`, in float32, if
    oneDNN computes it faster. torch calls MKL, which does not use all of some CPUs: on an AMD EPYC
    with AVX-512, oneDNN takes 0.6 of its time for 64 tokens, 0.85 for 500."""
    is_large = x.numel() * weight.shape[0] >= _LEAST_MULTIPLICATIONS
    if is_large and mkldnn.enabled and onednn_is_faster():
        return by_onednn(x, weight, bias)
    return None


def by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product by oneDNN."""
    return _onednn(x, weight, bias, "none", [], "")


@cache
def onednn_is_faster() -> bool:
    """True if oneDNN is clearly faster than torch on this CPU. It is found out once a process, so
    that all passes have the same bits."""
    if _onednn is None:
        return False
    x = torch.ones((64, 1024), device="cpu", dtype=torch.float32)
    # More than the CPU's caches hold, as a model has.
    weights = torch.ones((8, 1024, 1024), device="cpu", dtype=torch.float32)
    seconds: dict[Any, list[float]] = {by_torch: [], by_onednn: []}
    for weight in weights:
        for product, times in seconds.items():
            began = perf_counter()
            product(x, weight, None)
            times.append(perf_counter() - began)
    return median(seconds[by_torch]) > _GAIN * median(seconds[by_onednn])


def attend_narrowly(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    ends: np.ndarray,
    scale: float | None,
    least_slots: int = LEAST_SLOTS,
) -> Tensor | None:
    """Attention of queries `(rows, heads, S, head_dim)` to keys and values of fewer heads, if the
    kernel computes it, and some row sees at least so many slots. Tokens see the slots of the
    `mask`, bool `(rows, S or 1, slots)`, by default all; their rows see none outside their `ends`,
    int64 `(rows, 2)`."""
    most_slots = int((ends[:, 1] - ends[:, 0]).max())
    is_narrow = (
        query.shape[2] <= MAX_TOKENS
        and most_slots >= least_slots
        and _are_plain([query, keys, values], ATTENDED)
        and keys.stride(-1) == values.stride(-1) == 1
        and narrow_attention.address is not None
        and why_inactive() is None
        and not torch.compiler.is_compiling()
    )
    if not is_narrow:
        return None
    rows, heads, size, key_dim = query.shape
    key_heads, value_dim = keys.shape[1], values.shape[-1]
    used = heads // key_heads * size
    columns = -(-used // narrow.LANES) * narrow.LANES
    pieces = -(-most_slots // attention.PIECE)
    scale = key_dim**-0.5 if scale is None else scale
    query = query.float().mul(scale * math.log2(math.e)).contiguous()  # for powers of two
    output = query.new_empty((rows, heads, size, value_dim))
    parts = query.new_empty((rows * key_heads * pieces, value_dim + 3, columns))
    masked = 0, 0, 0
    if mask is not None:
        mask = mask.expand(-1, size, -1)
        masked = mask.data_ptr(), mask.stride(0), mask.stride(1)
    words = [
        *(0, query.data_ptr(), keys.data_ptr(), values.data_ptr(), output.data_ptr()),
        *(parts.data_ptr(), *keys.stride()[:3], *values.stride()[:3], *masked),
        *(rows, key_heads, heads // key_heads, size, key_dim, value_dim, pieces),
        *(keys.dtype == torch.bfloat16, *ends.ravel(), *[0] * (rows * key_heads)),
    ]
    _run(narrow_attention, words)
    return output.to(values.dtype)


def _run(kernel: Kernel, words: list[int]) -> None:
    """Runs a task, see the kernel for its `words`, on all of torch's threads."""
    task = (ctypes.c_int64 * len(words))(*words)
    _parallel(ctypes.c_void_p(kernel.address), task, torch.get_num_threads(), 0)


class _WithoutPlans:
    """Attention by other kernels than cuDNN's.

    torch prefers cuDNN on some GPUs, which builds a plan for each shape that it has not met: 13 ms
    of the host in a pass of Llama 3.1 8B on an H100, and nearly every pass has a new shape. torch
    asks one flag for all threads: the first to enter clears it, the last to leave puts it back.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._passes = 0
        self._was_enabled = False

    def __enter__(self) -> None:
        with self._lock:
            if self._passes == 0:
                self._was_enabled = cuda.cudnn_sdp_enabled()
                cuda.enable_cudnn_sdp(False)
            self._passes += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._passes -= 1
            if self._passes == 0:
                cuda.enable_cudnn_sdp(self._was_enabled)


_WITHOUT_PLANS = _WithoutPlans()
