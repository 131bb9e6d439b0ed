"""The linear layers of a pass over a few tokens, by the kernel for narrow products.

Inside of [`narrow_products`], `torch.nn.functional.linear` sends products that
`index/narrow_product.py` computes faster to it: 2 to 32 tokens on a CPU, plain weights in
float32 or bfloat16. Whatever else a layer is (quantised, sharded, an adapter's sum, a module with
hooks) computes what it computes, and its plain products alone are sent. The model is not changed,
and other threads and calls see nothing. The kernel runs on torch's own threads: torch's OpenMP
library calls it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from ..index.narrow_product import (
    INNER_MULTIPLE,
    MATRIX_UNITS,
    ROWS,
    SUPPORTED,
    TASK_LENGTH,
    narrow_product,
)

MAX_TOKENS = 32
DTYPES = [torch.float32] if MATRIX_UNITS else [torch.float32, torch.bfloat16]

_Task = ctypes.c_int64 * (TASK_LENGTH + 1)
_ZERO = 8 * TASK_LENGTH  # the task's last word, which stands for absent biases


def _on_threads_of_torch() -> Any:
    """`GOMP_parallel(function, argument, n_threads, flags)` of the library that torch is linked
    with; `None` where it is not linked with one."""
    try:
        parallel = ctypes.CDLL(torch._C.__file__).GOMP_parallel
    except (AttributeError, OSError):
        return None
    parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None
    return parallel


_parallel = _on_threads_of_torch()


def narrow_products() -> AbstractContextManager:
    """Around a pass; changes nothing where the CPU or torch's build lacks what the kernel needs,
    until the kernel is compiled, or if `HF_REFSPEC_NARROW_PRODUCTS` is 0."""
    if (
        not SUPPORTED
        or _parallel is None
        or not narrow_product.address
        or os.environ.get("HF_REFSPEC_NARROW_PRODUCTS") == "0"
    ):
        return nullcontext()
    return _NarrowProducts(narrow_product.address)


class _NarrowProducts(TorchFunctionMode):
    def __init__(self, address: int) -> None:
        super().__init__()
        self._address = address

    def __torch_function__(
        self, function: Callable, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is linear and not kwargs and _is_narrow(*args):
            return self._product(*args)
        return function(*args, **kwargs) if kwargs else function(*args)

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        outer, inner = weight.shape
        y = x.new_empty((*x.shape[:-1], outer))
        task = _Task(
            0,
            weight.data_ptr(),
            x.data_ptr(),
            y.data_ptr(),
            0,
            0,
            inner,
            outer,
            x.numel() // inner,
            x.dtype == torch.bfloat16,
        )
        if bias is None:
            task[4] = ctypes.addressof(task) + _ZERO
        else:
            task[4] = bias.data_ptr()
            task[5] = bias.element_size()
        _parallel(self._address, task, torch.get_num_threads(), 0)
        return y


def _is_narrow(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Whether the kernel computes this product, and faster than torch."""
    operands = [x, weight] if bias is None else [x, weight, bias]
    dtype = x.dtype
    return (
        dtype in DTYPES
        and all(
            type(operand) in (Tensor, Parameter)
            and operand.dtype == dtype
            and operand.device.type == "cpu"
            and operand.is_contiguous()
            for operand in operands
        )
        and weight.ndim == 2
        and weight.shape[1] % INNER_MULTIPLE == 0
        and weight.shape[0] >= ROWS
        and x.shape[-1] == weight.shape[1]
        and 2 * x.shape[-1] <= x.numel() <= MAX_TOKENS * x.shape[-1]
        and (bias is None or bias.shape == weight.shape[:1])
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
    )
