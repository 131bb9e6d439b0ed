"""The linear layers of a pass over a few tokens, by the kernel for narrow products.

Inside of [`narrow_products`], calls of `torch.nn.functional.linear` whose products
`index/narrow_product.py` computes faster go there: 2 to 32 tokens on a CPU, plain weights in
float32 or bfloat16. Quantised and sharded weights are left to torch; hooks and adapters run as
ever, around those of their products that are plain. The model is not changed, and other threads
and calls see nothing. torch's own threads run the kernel: torch's OpenMP library calls it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from ..index import narrow_product as kernel
from ..index.narrow_product import narrow_product

MAX_TOKENS = 32
DTYPES = [torch.float32] if kernel.MATRIX_UNITS else [torch.float32, torch.bfloat16]

_Task = ctypes.c_int64 * (kernel.TASK_LENGTH + 1)
_NO_BIAS = 8 * kernel.TASK_LENGTH  # where a task holds a zero, its last word

_parallel: Any = None
with suppress(AttributeError, OSError):  # torch's OpenMP library may lack GNU's interface
    _parallel = ctypes.CDLL(getattr(find_spec("torch._C"), "origin", None)).GOMP_parallel


def narrow_products() -> AbstractContextManager[NarrowProducts | None]:
    """Around a pass that is not compiled; does nothing where the kernel cannot be used."""
    return NarrowProducts() if _why_inactive() is None else nullcontext()


def why_unused(weight: Tensor) -> str | None:
    """Why passes of a model with such weights do not use the kernel; `None` if they do."""
    if not weight.is_cpu:
        return f"the weights are on {weight.device}"
    if weight.dtype not in DTYPES:
        return f"torch multiplies {str(weight.dtype).removeprefix('torch.')} itself on this CPU"
    return _why_inactive()


def _why_inactive() -> str | None:
    if os.environ.get("HF_REFSPEC_NARROW_PRODUCTS") == "0":
        return "`HF_REFSPEC_NARROW_PRODUCTS` is 0"
    if not kernel.SUPPORTED:
        return "the CPU lacks AVX2, or llvmlite is too old"
    if _parallel is None:
        return "torch was built without GNU's OpenMP"
    if narrow_product.address is None:
        return "it is not compiled yet"
    return None


class NarrowProducts(TorchFunctionMode):
    """Sends narrow products to the kernel, and counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self._kernel = ctypes.c_void_p(narrow_product.address)

    def __torch_function__(
        self, function: Callable, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is linear and not kwargs and _is_narrow(*args):
            self.count += 1
            return self._product(*args)
        return function(*args, **kwargs) if kwargs else function(*args)

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        y = x.new_empty((*x.shape[:-1], weight.shape[0]))
        task = _Task()
        task[kernel.WEIGHT] = weight.data_ptr()
        task[kernel.X] = x.data_ptr()
        task[kernel.Y] = y.data_ptr()
        task[kernel.OUTER], task[kernel.INNER] = weight.shape
        task[kernel.N_TOKENS] = x.numel() // weight.shape[1]
        task[kernel.BFLOAT16] = x.dtype == torch.bfloat16
        if bias is None:
            task[kernel.BIAS] = ctypes.addressof(task) + _NO_BIAS
        else:
            task[kernel.BIAS] = bias.data_ptr()
            task[kernel.BIAS_STEP] = bias.element_size()
        _parallel(self._kernel, task, torch.get_num_threads(), 0)
        return y


def _is_narrow(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Whether the kernel computes this product, and faster than torch."""
    operands = [x, weight] if bias is None else [x, weight, bias]
    return (
        x.dtype in DTYPES
        and all(_is_plain(operand, x.dtype) for operand in operands)
        and weight.ndim == 2
        and weight.shape[1] % kernel.INNER_MULTIPLE == 0
        and weight.shape[0] >= kernel.ROWS
        and x.shape[-1] == weight.shape[1]
        and 2 * x.shape[-1] <= x.numel() <= MAX_TOKENS * x.shape[-1]
        and (bias is None or bias.shape == weight.shape[:1])
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
    )


def _is_plain(operand: Tensor, dtype: torch.dtype) -> bool:
    return (
        type(operand) in (Tensor, Parameter)  # neither quantised nor sharded
        and operand.dtype == dtype
        and operand.is_cpu
        and operand.layout == torch.strided
        and operand.is_contiguous()
        and operand.data_ptr() != 0  # where weights are offloaded
    )
