"""The target model's choice and its best next tokens at every node, in one copy from the device.

Logits on the host are read twice, in blocks and at the speed of memory: once for the largest of
each block, once for the sum of exponentials. torch's argmax and top-k compare number by number.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numba import njit

from ..kernels.kernel import kernel

# The logits of a block, and the rows that are read together, which fit into the processor's cache.
BLOCK, _ROWS = 64, 16
# The sum of exponentials is over all blocks with a logit this close to the highest, and over one in
# `_SAMPLED` of the others: more are slower and more accurate.
_CLOSE = np.float32(4.0)
_SAMPLED = 4


class TopTokens(NamedTuple):
    """The best next tokens after each row and each node of its draft, on the host.

    Attributes:
        choices (`np.ndarray`, int32 of shape `(R, 1 + T)`): The argmax of the raw logits.
        tokens (`np.ndarray`, int32 of shape `(R, 1 + T, k)`): The k best, the most probable first.
        probs (`np.ndarray`, float32 of the same shape): Their approximate softmax; 0 for NaN.
    """

    choices: np.ndarray
    tokens: np.ndarray
    probs: np.ndarray


def top_tokens(logits: torch.Tensor, k: int) -> TopTokens:
    """The argmax at every node of logits `(R, 1 + T, vocab_size)`, and the k best next tokens with
    their probabilities (none if k is 0). The host synchronises with a GPU once."""
    k = min(k, logits.shape[-1])
    if logits.device.type != "cpu":
        return _by_torch(logits, k)
    flat = logits.flatten(0, -2)
    shape = logits.shape[:-1]
    choices = np.empty(len(flat), dtype=np.int32)
    tokens, probs = np.empty((len(flat), k), np.int32), np.empty((len(flat), k), np.float32)
    whole = flat.shape[1] // BLOCK * BLOCK  # the last block may be shorter
    for start in range(0, len(flat), _ROWS):
        rows = slice(start, start + _ROWS)
        part = flat[rows].float().contiguous()
        largest = part[:, :whole].unflatten(1, (-1, BLOCK)).amax(dim=-1)
        if whole < part.shape[1]:
            largest = torch.cat((largest, part[:, whole:].amax(dim=-1, keepdim=True)), dim=-1)
        _top_of_blocks(part.numpy(), largest.numpy(), choices[rows], tokens[rows], probs[rows])
    return TopTokens(choices.reshape(shape), tokens.reshape(*shape, k), probs.reshape(*shape, k))


def _by_torch(logits: torch.Tensor, k: int) -> TopTokens:
    choices = logits.argmax(dim=-1, keepdim=True).int()
    if k == 0:
        packed = choices
    else:
        values, tokens = logits.topk(k, dim=-1)
        # In float32: 16 bits cannot sum over a vocabulary.
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


@kernel("void(float32[:, ::1], float32[:, ::1], int32[::1], int32[:, ::1], float32[:, ::1])")
def _top_of_blocks(logits, largest, choices, tokens, probs):
    """Writes each row's argmax, and its k best tokens with their approximate softmax, given the
    largest logit of each block. As in torch.argmax, the first of equal logits is chosen, and NaN is
    above all; a row with NaN has probabilities of 0."""
    keys = np.empty(tokens.shape[1], dtype=np.float32)
    blocks = np.empty(tokens.shape[1], dtype=np.int32)
    for row in range(len(logits)):
        start = BLOCK * _argmax(largest[row])
        choice = choices[row] = start + _argmax(logits[row, start : start + BLOCK])
        if logits[row, choice] != logits[row, choice]:
            tokens[row], probs[row] = 0, 0.0
        elif len(keys) > 0:
            # The k best tokens are in the k blocks with the largest best logits.
            count = _keep_best(largest[row], 0, blocks, keys, 0)
            number = 0
            for block in blocks[:count]:
                start = np.int64(block) * BLOCK
                number = _keep_best(
                    logits[row, start : start + BLOCK], start, tokens[row], keys, number
                )
            _softmax(logits[row], largest[row], tokens[row], probs[row])


@njit(nogil=True)
def _argmax(values):
    """The index of the first largest value, or of the first NaN."""
    best = 0
    for i in range(len(values)):
        if values[i] != values[i]:
            return i
        if values[i] > values[best]:
            best = i
    return best


@njit(nogil=True)
def _keep_best(values, start, items, keys, count):
    """Inserts values into a list of the largest ones, `keys`, after equal ones, and their places,
    counted from `start`, into `items`; returns the list's new length."""
    for i in range(len(values)):
        key = values[i]
        if count == len(keys) and not key > keys[count - 1]:
            continue
        place = min(count, len(keys) - 1)  # a full list loses its last
        while place > 0 and key > keys[place - 1]:
            items[place], keys[place] = items[place - 1], keys[place - 1]
            place -= 1
        items[place], keys[place] = start + i, key
        count = min(count + 1, len(keys))
    return count


@njit(nogil=True)
def _softmax(logits, largest, best, probs):
    """Writes the best tokens' probabilities; samples the other exponentials."""
    highest = logits[best[0]]
    least = logits[best[-1]]
    close = highest - _CLOSE
    total = sampled = 0.0
    seen = others = 0
    for block in range(len(largest)):
        values = logits[block * BLOCK : (block + 1) * BLOCK]
        if largest[block] >= close:
            total += _sum_of_exponentials(values, highest, least)
            continue
        if others % (_SAMPLED * BLOCK) == 0:
            sampled += _sum_of_exponentials(values, highest, least)
            seen += len(values)
        others += len(values)
    if seen > 0:
        total += sampled * others / seen
    for i in range(len(best)):
        probs[i] = np.exp(logits[best[i]] - highest)
        total += probs[i]
        if logits[best[i]] == least and largest[best[i] // BLOCK] >= close:
            total -= _exponential(least - highest)  # a block's sum has it too
    for i in range(len(best)):
        probs[i] = probs[i] / total if total > 0 else 0.0


@njit(fastmath={"reassoc", "contract"}, nogil=True)
def _sum_of_exponentials(logits, highest, least):
    """The approximate sum of exp(logit - highest) over the logits up to `least`."""
    total = np.float32(0.0)
    for i in range(len(logits)):
        power = _exponential(logits[i] - highest)
        total += power if logits[i] <= least else np.float32(0.0)
    return total


@njit(nogil=True, inline="always")
def _exponential(x):
    """exp(x) as (1 + x / 256) ** 256, 5 percent too small at -5, by vector instructions."""
    power = x * np.float32(1 / 256) + np.float32(1.0)
    power = power if power > 0 else np.float32(0.0)
    for _ in range(8):
        power *= power
    return power
