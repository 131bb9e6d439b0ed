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
_LEAST_BITS = np.array(-np.inf, dtype=np.float32).view(np.int32)[()]


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
    shape = logits.shape[:-1]
    choices = np.empty(len(flat), dtype=np.int32)
    tokens = np.empty((len(flat), k), dtype=np.int32)
    probs = np.empty((len(flat), k), dtype=np.float32)
    if flat.dtype == torch.bfloat16:
        top_of_rows(flat.view(torch.uint16).numpy(), 16, choices, tokens, probs)
    else:
        flat = flat.float()
        top_of_rows(flat.view(torch.int32).numpy(), 0, choices, tokens, probs)
    for row in np.flatnonzero(choices < 0):
        choices[row] = flat[row].argmax()
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


_ROWS = "int32, int32[::1], int32[:, ::1], float32[:, ::1]"


@kernel(f"void(int32[:, ::1], {_ROWS})", f"void(uint16[:, ::1], {_ROWS})")
def top_of_rows(logits, shift, choices, tokens, probs):
    """Writes the argmax of each row, and its k best tokens with about their softmax.

    `choices` is -1 where that is left to torch: of equal logits it chooses the first, 0.0 and -0.0
    among them, and NaN is above all. The best tokens of a row with NaN have probabilities of 0.

    Args:
        logits: The bits of float32 numbers, or of 16-bit ones that become float32 by a `shift`.
    """
    largest = np.empty((logits.shape[1] + BLOCK - 1) // BLOCK, dtype=np.int32)
    bits = np.full(len(largest) * BLOCK, _LEAST_BITS, dtype=np.int32)  # fills the last block
    for row in range(len(logits)):
        for i in range(logits.shape[1]):
            bits[i] = np.int32(logits[row, i]) << shift
        if _largest_of_blocks(bits, largest):
            for i in range(len(tokens[row])):
                tokens[row, i], probs[row, i] = 0, 0.0
            choices[row] = -1
            continue
        best = np.empty(max(len(tokens[row]), 1), dtype=np.int32)
        _best_of_blocks(bits, largest, best)
        if len(tokens[row]) > 0:
            for i in range(len(best)):
                tokens[row, i] = best[i]
            _softmax(bits.view(np.float32), logits.shape[1], largest, best, probs[row])
        choices[row] = -1 if bits[best[0]] & 0x7FFFFFFF == 0 else best[0]


@njit(nogil=True, inline="always")
def _ordered(bits):
    """Bits of a float as an integer of the same order: only integers compare as vectors."""
    return bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF))


@njit(nogil=True)
def _largest_of_blocks(bits, largest):
    """Writes the largest of each block as `_ordered`; returns whether any is NaN."""
    most = np.int32(0)
    for block in range(len(largest)):
        high, magnitude = np.int32(-(2**31)), np.int32(0)
        first = block * BLOCK
        for i in range(BLOCK):
            high = max(high, _ordered(bits[first + i]))
            magnitude = max(magnitude, bits[first + i] & np.int32(0x7FFFFFFF))
        largest[block] = high
        most = max(most, magnitude)
    return most > 0x7F800000


@njit(nogil=True)
def _best_of_blocks(bits, largest, best):
    """Writes the k best tokens, which are in the k blocks with the best largest logits."""
    k = len(best)
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
        for token in range(block * BLOCK, (block + 1) * BLOCK):
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
def _softmax(logits, size, largest, best, probs):
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
        count = min(BLOCK, size - first)
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
