"""The target model's choice and its best next tokens at every node, in one copy from the device."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from ..index import top_tokens as kernels


class TopTokens(NamedTuple):
    """The best next tokens after each row and each node of its draft, on the host.

    Attributes:
        choices (`np.ndarray`, int32 of shape `(R, 1 + T)`): The argmax of the raw logits.
        tokens (`np.ndarray`, int32 of shape `(R, 1 + T, k)`): The k best, the most probable first.
        probs (`np.ndarray`, float32 of the same shape): About their softmax; 0 where that is NaN.
    """

    choices: np.ndarray
    tokens: np.ndarray
    probs: np.ndarray


def top_tokens(logits: torch.Tensor, k: int) -> TopTokens:
    """The argmax at every node, and the k best next tokens with their probabilities.

    Args:
        logits (`torch.Tensor` of shape `(R, 1 + T, vocab_size)`): The target model's. A GPU is
            waited for once.
        k (`int`): How many; 0 for the argmax alone. At most the vocabulary's size are returned.
    """
    k = min(k, logits.shape[-1])
    return _on_host(logits, k) if logits.device.type == "cpu" else _on_device(logits, k)


def _on_host(logits: torch.Tensor, k: int) -> TopTokens:
    flat = logits.contiguous().flatten(0, -2)
    rows = flat.shape[0]
    choices = np.empty(rows, dtype=np.int32)
    tokens = np.empty((rows, k), dtype=np.int32)
    probs = np.empty((rows, k), dtype=np.float32)
    if flat.dtype == torch.bfloat16:
        bits = flat.view(torch.uint16).numpy()
        kernels.top_tokens_of_bfloat16(bits, choices, tokens, probs)
    else:
        kernels.top_tokens(flat.float().numpy(), choices, tokens, probs)
    shape = logits.shape[:-1]
    return TopTokens(choices.reshape(shape), tokens.reshape(*shape, k), probs.reshape(*shape, k))


def _on_device(logits: torch.Tensor, k: int) -> TopTokens:
    choices = logits.argmax(dim=-1, keepdim=True).int()
    if k == 0:
        packed = choices
    else:
        values, tokens = logits.topk(k, dim=-1)
        # In float32: a sum over a vocabulary is nothing in 16 bits.
        probs = (values.float() - logits.float().logsumexp(dim=-1, keepdim=True)).exp()
        # Probabilities travel as the bits of an int32: (R, 1 + T, 1 + 2 k).
        bits = probs.nan_to_num(0.0, 0.0, 0.0).view(torch.int32)
        packed = torch.cat([choices, tokens.int(), bits], dim=-1)
    host = packed.numpy(force=True)
    return TopTokens(
        host[..., 0],
        np.ascontiguousarray(host[..., 1 : 1 + k]),
        np.ascontiguousarray(host[..., 1 + k :]).view(np.float32),
    )
