"""The kernels of a pass that is not compiled, where torch's own choice suits few tokens badly."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.backends import cuda
from transformers import PreTrainedModel

from .narrow_products import narrow_products


def eager_kernels(model: PreTrainedModel) -> AbstractContextManager[Any]:
    """Around a forward pass after a prompt: narrow products on a CPU, attention without plans on a
    GPU. A compiled model, which decodes plainly in a running batch, is left alone."""
    if model._compiled_call_impl is not None:
        return nullcontext()
    return narrow_products() if model.device.type == "cpu" else _WITHOUT_PLANS


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
