"""The target model's choice and its best next tokens at every node, in one copy from the device.

Logits on the host are read once, at the speed of memory: torch's argmax, top-k and log-sum-exp
read them three times, and the first two compare one number after another.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numba import njit

from ..index.kernels import kernel

# Logits in a block, of which only the largest is compared at first. Larger blocks are found faster,
# and take longer to search.
BLOCK = 64
# The sum of exponentials is over all blocks with a logit so close to the highest, and one in so
# many of the others: a trade of time for accuracy.
_CLOSE = np.float32(4.0)
_SAMPLED = 4


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
        logits (`torch.Tensor` of shape `(R, 1 + T, vocab_size)`): The target model's. The host
            synchronises with a GPU once.
        k (`int`): At most the vocabulary's size count; 0 for the argmax alone.
    """
    k = min(k, logits.shape[-1])
    plain = k == 0 and logits.shape[1] == 1  # a step without a draft waits for no kernel
    on_host = logits.device.type == "cpu" and not plain
    return _on_host(logits, k) if on_host else _by_torch(logits, k)


def _on_host(logits: torch.Tensor, k: int) -> TopTokens:
    flat = logits.contiguous().flatten(0, -2)
    rows = flat.shape[0]
    choices = np.empty(rows, dtype=np.int32)
    tokens = np.empty((rows, k), dtype=np.int32)
    probs = np.empty((rows, k), dtype=np.float32)
    if flat.dtype == torch.bfloat16:
        bits = flat.view(torch.uint16).numpy()
        _top_of_bfloat16(bits, choices, tokens, probs)
    else:
        _top_of_float32(flat.float().numpy(), choices, tokens, probs)
    shape = logits.shape[:-1]
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


@kernel("void(float32[:, ::1], int32[::1], int32[:, ::1], float32[:, ::1])")
def _top_of_float32(logits, choices, tokens, probs):
    """Writes the argmax of each row, and its k best tokens with about their softmax.

    As in torch.argmax, the first of equal ones is chosen, and NaN is above all; a row with NaN has
    probabilities of 0.
    """
    largest = np.empty((logits.shape[1] + BLOCK - 1) // BLOCK, dtype=np.int32)
    for row in range(len(logits)):
        choices[row] = _top_of_row(logits[row], largest, tokens[row], probs[row])


@kernel("void(uint16[:, ::1], int32[::1], int32[:, ::1], float32[:, ::1])")
def _top_of_bfloat16(logits, choices, tokens, probs):
    """[`_top_of_float32`] of bfloat16 numbers, of which `logits` are the bits."""
    largest = np.empty((logits.shape[1] + BLOCK - 1) // BLOCK, dtype=np.int32)
    bits = np.empty(logits.shape[1], dtype=np.int32)
    for row in range(len(logits)):
        half = logits[row]
        for i in range(len(bits)):
            bits[i] = np.int32(half[i]) << np.int32(16)
        choices[row] = _top_of_row(bits.view(np.float32), largest, tokens[row], probs[row])


@njit(nogil=True)
def _top_of_row(logits, largest, tokens, probs):
    if _largest_of_blocks(logits.view(np.int32), largest):
        for i in range(len(tokens)):
            tokens[i], probs[i] = 0, 0.0
        return _first_nan(logits)
    best = np.empty(max(len(tokens), 1), dtype=np.int32)
    _best_of_blocks(logits, largest, best)
    if len(tokens) > 0:
        for i in range(len(tokens)):
            tokens[i] = best[i]
        _softmax(logits, largest, best, probs)
    choice = best[0]
    if logits[choice] == 0.0:  # -0.0 is below 0.0 in the order of bits, and equal to it
        choice = _first_zero(logits)
    return choice


@njit(nogil=True)
def _ordered(bits):
    """Bits of a float as an integer of the same order: only integers compare as vectors."""
    return bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF))


@njit(nogil=True)
def _largest_of_blocks(bits, largest):
    """Writes the largest of each block as `_ordered`; returns whether any is NaN."""
    most = np.int32(0)
    for block in range(len(largest)):
        first = block * BLOCK
        if first + BLOCK <= len(bits):  # a fixed number of steps is what compiles well
            largest[block], magnitude = _largest(bits, first, BLOCK)
        else:
            largest[block], magnitude = _largest(bits, first, len(bits) - first)
        most = max(most, magnitude)
    return most > 0x7F800000


@njit(nogil=True, inline="always")
def _largest(bits, first, count):
    largest, magnitude = np.int32(-(2**31)), np.int32(0)
    for i in range(first, first + count):
        largest = max(largest, _ordered(bits[i]))
        magnitude = max(magnitude, bits[i] & np.int32(0x7FFFFFFF))
    return largest, magnitude


@njit(nogil=True)
def _best_of_blocks(logits, largest, best):
    """Writes the k best tokens, which are in the k blocks with the best largest logits."""
    bits, k = logits.view(np.int32), len(best)
    blocks = np.empty(k, dtype=np.int32)
    keys = np.empty(k, dtype=np.int32)
    count = 0
    for block in range(len(largest)):
        if count < k or largest[block] > keys[k - 1]:  # here: a call for each takes longer
            count = _insert(blocks, keys, count, block, largest[block])
    # In their own order, so that of equal tokens the first is the best. Not by np.sort, which would
    # take longer to compile than anything else here.
    chosen, number = np.empty(k, dtype=np.int32), 0
    for i in range(count):
        number = _insert(chosen, keys, number, np.int64(blocks[i]), np.int32(-blocks[i]))
    count = 0
    for block in chosen[:number]:
        for token in range(block * BLOCK, min((block + 1) * BLOCK, len(bits))):
            key = _ordered(bits[token])
            if count < k or key > keys[k - 1]:
                count = _insert(best, keys, count, token, key)


@njit(nogil=True)
def _insert(items, keys, count, item, key):
    """Adds an item to a list of the largest keys, behind equal ones; returns its new length."""
    place = min(count, len(items) - 1)  # a full list loses its last
    while place > 0 and key > keys[place - 1]:
        items[place], keys[place] = items[place - 1], keys[place - 1]
        place -= 1
    items[place], keys[place] = item, key
    return min(count + 1, len(items))


@njit(nogil=True)
def _softmax(logits, largest, best, probs):
    """Writes the best tokens' probabilities; the exponentials of the others are sampled."""
    highest, least = logits[best[0]], logits[best[-1]]
    total = 0.0
    for i in range(len(best)):
        probs[i] = np.exp(logits[best[i]] - highest) if highest > -np.inf else 0.0
        total += probs[i]
    limit = np.full(1, highest - _CLOSE, dtype=np.float32)
    close = _ordered(limit.view(np.int32)[0])
    sampled, seen, others = 0.0, 0, 0
    for block in range(len(largest)):
        first = block * BLOCK
        count = min(BLOCK, len(logits) - first)
        if largest[block] >= close:
            total += _sum_of_exponentials(logits, first, count, highest, least)
            continue
        if others % (_SAMPLED * BLOCK) == 0:
            sampled += _sum_of_exponentials(logits, first, count, highest, least)
            seen += count
        others += count
    if seen > 0:
        total += sampled * others / seen
    for token in best:  # those equal to the last of them were summed as well
        if logits[token] == least and largest[token // BLOCK] >= close:
            total -= _exponential(least - highest)
    for i in range(len(best)):
        probs[i] = probs[i] / total if total > 0 else 0.0


@njit(fastmath={"reassoc", "contract"}, nogil=True)
def _sum_of_exponentials(logits, first, count, highest, least):
    """About the sum of exp(logit - highest) of those up to `least`."""
    if count == BLOCK:  # a fixed number of steps is what compiles well
        return _sum(logits, first, BLOCK, highest, least)
    return _sum(logits, first, count, highest, least)


@njit(nogil=True, inline="always")
def _sum(logits, first, count, highest, least):
    total = np.float32(0.0)
    for i in range(first, first + count):
        power = _exponential(logits[i] - highest)
        total += power if logits[i] <= least else np.float32(0.0)
    return total


@njit(nogil=True, inline="always")
def _exponential(x):
    """exp(x) as (1 + x / 256) ** 256, 5 percent too little at -5: it compiles to vector
    instructions."""
    power = x * np.float32(1 / 256) + np.float32(1.0)
    power = power if power > 0 else np.float32(0.0)
    for _ in range(8):
        power *= power
    return power


@njit(nogil=True)
def _first_nan(logits):
    for i in range(len(logits)):
        if logits[i] != logits[i]:
            return i
    return 0


@njit(nogil=True)
def _first_zero(logits):
    for i in range(len(logits)):
        if logits[i] == 0.0:
            return i
    return 0
