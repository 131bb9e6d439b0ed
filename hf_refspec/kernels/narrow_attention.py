"""Attention of a few queries to a long text, which reads each key and value once.

The queries of all tokens and heads that share keys are the lanes of vector registers. A tile
multiplies `ROWS` keys, or columns of the values, by one vector of queries and keeps the sums there.
LLVM would not find that in plain loops, so a tile is written in LLVM's instructions. All sums are
in float32, also of bfloat16.

Threads share a task, and claim pieces of `PIECE` slots of a row and key head from it. A piece is
attended to in blocks of `BLOCK` slots (online softmax; FlashAttention, arXiv 2205.14135), and the
thread that finishes the last piece merges them. Pieces and blocks begin where the row does, and all
sums go in the order of slots: the bits of a query's output depend on its own row alone, not on
other queries, on other rows, or on the number of threads.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, float32, int32, int64, njit, types, uint8, uint16
from numba.core import cgutils
from numba.extending import intrinsic

from .kernel import kernel
from .narrow_product import (
    BITS,
    F32,
    I32,
    I64,
    LANES,
    SUPPORTED,
    VECTOR,
    add_to_shared,
    fetch_line,
    multiply_add,
)

ROWS = 8
BLOCK = 64
PIECE = 512

# A task, as int64: the next piece to claim, addresses, strides in numbers, sizes, and 1
# if keys and values are bfloat16. `MASK` is 0 where nothing is hidden. Queries, which are
# scaled for powers of two, and outputs are float32, `(rows, heads of keys, groups * tokens, dim)`.
# After the task follow the first slot of each row and the end of its slots, and, for each row and
# head of keys, how many pieces are finished.
NEXT_PIECE, QUERY, KEY, VALUE, OUTPUT, PARTS, KEY_ROW, KEY_HEAD, KEY_SLOT = range(9)
VALUE_ROW, VALUE_HEAD, VALUE_SLOT, MASK, MASK_ROW, MASK_TOKEN = range(9, 15)
N_ROWS, N_HEADS, GROUPS, TOKENS, KEY_DIM, VALUE_DIM, N_PIECES, BFLOAT16 = range(15, 23)
TASK_LENGTH = 23

_LOWEST = np.finfo(np.float32).min  # below all scores, and finite


def _all(number: float, kind: Any = VECTOR) -> Any:
    return ir.Constant(kind, [number] * LANES)


def _at(builder: Any, address: Any, step: Any, count: Any) -> Any:
    address = builder.add(address, builder.mul(step, count))
    return builder.inttoptr(address, VECTOR.as_pointer())


@intrinsic
def _multiply_tile(typing, rows, a, a_row, a_step, b, c, line, count, ahead, ahead_step):
    """`c[i] += sum(a[i, k] * b[k] for k in range(count))` for `ROWS` rows or one, where `b[k]` and
    `c[i]` are vectors, `line` bytes apart. Fetches what is needed next. The arguments are addresses
    and strides in bytes."""

    def emit(context, builder, signature, arguments):
        with builder.if_else(builder.icmp_signed("==", arguments[0], I64(1))) as (one, all_rows):
            with one:
                _emit_tile(builder, 1, *arguments[1:])
            with all_rows:
                _emit_tile(builder, ROWS, *arguments[1:])
        return context.get_dummy_value()

    return types.void(*[int64] * 10), emit


def _emit_tile(builder: Any, rows: int, *arguments: Any) -> None:
    a, a_row, a_step, b, c, line, count, ahead, ahead_step = arguments
    places = [_at(builder, c, line, I64(row)) for row in range(rows)]
    starts = [builder.load(place, align=4) for place in places]
    sums = [cgutils.alloca_once_value(builder, start) for start in starts]
    with cgutils.for_range(builder, count) as loop:
        fetch_line(builder, builder.add(ahead, builder.mul(loop.index, ahead_step)))
        vector = builder.load(_at(builder, b, loop.index, line), align=4)
        a_at = builder.add(a, builder.mul(loop.index, a_step))
        for row in range(rows):
            place = builder.bitcast(_at(builder, a_at, a_row, I64(row)), F32.as_pointer())
            number = builder.insert_element(_all(0), builder.load(place, align=4), I32(0))
            number = builder.shuffle_vector(number, number, _all(0, BITS))
            so_far = builder.load(sums[row])
            total = multiply_add(builder, number, vector, so_far)
            builder.store(total, sums[row])
    for place, total in zip(places, sums, strict=True):
        builder.store(builder.load(total), place, align=4)


@intrinsic
def _weigh_tile(typing, scores, line, count, best):
    """Turns `count` vectors of scores, `line` bytes apart, into weights relative to the best
    score of each query, of these and earlier ones. Updates the best, in the next line the sum of
    weights, and in the line after it the factor of earlier weights."""

    def emit(context, builder, signature, arguments):
        scores, line, count, best = arguments
        places = [_at(builder, best, line, I64(i)) for i in range(3)]
        before, total = (builder.load(place, align=4) for place in places[:2])
        highest = cgutils.alloca_once_value(builder, before)
        with cgutils.for_range(builder, count) as loop:
            score = builder.load(_at(builder, scores, loop.index, line), align=4)
            so_far = builder.load(highest)
            is_higher = builder.fcmp_ordered(">", score, so_far)
            builder.store(builder.select(is_higher, score, so_far), highest)
        now = builder.load(highest)
        factors = _exp2(builder, builder.fsub(before, now))
        weights = cgutils.alloca_once_value(builder, builder.fmul(total, factors))
        with cgutils.for_range(builder, count) as loop:
            place = _at(builder, scores, loop.index, line)
            weight = _exp2(builder, builder.fsub(builder.load(place, align=4), now))
            builder.store(weight, place, align=4)
            builder.store(builder.fadd(builder.load(weights), weight), weights)
        for result, place in zip((now, builder.load(weights), factors), places, strict=True):
            builder.store(result, place, align=4)
        return context.get_dummy_value()

    return types.void(*[int64] * 4), emit


def _exp2(builder: Any, x: Any) -> Any:
    """2**x of numbers up to 0; 0 where that is no normal number."""
    shift = _all(1.5 * 2**23)  # a number that is added to it loses its fraction
    shifted = builder.fadd(x, shift)
    fraction = builder.fsub(x, builder.fsub(shifted, shift))
    power = _all(0)
    for n in range(7, -1, -1):
        coefficient = _all(float(np.float32(math.log(2) ** n / math.factorial(n))))
        power = multiply_add(builder, power, fraction, coefficient)
    exponent = builder.shl(builder.bitcast(shifted, BITS), _all(23, BITS))
    scale = builder.bitcast(builder.add(exponent, _all(127 << 23, BITS)), VECTOR)
    is_normal = builder.fcmp_unordered(">=", x, _all(-126.0))
    return builder.select(is_normal, builder.fmul(power, scale), _all(0))


@intrinsic
def _pointer(typing, address):
    def emit(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(int64), emit


@kernel("void(voidptr)", drafts=SUPPORTED)
def narrow_attention(task):
    """Takes part in the task at an address, see `NEXT_PIECE`; several threads run it at once."""
    words = carray(task, TASK_LENGTH, int64)
    n_rows, n_heads, n_pieces = words[N_ROWS], words[N_HEADS], words[N_PIECES]
    key_dim, value_dim, used = words[KEY_DIM], words[VALUE_DIM], words[GROUPS] * words[TOKENS]
    query = carray(_pointer(words[QUERY]), (n_rows * n_heads, used, key_dim), float32)
    output = carray(_pointer(words[OUTPUT]), (n_rows * n_heads, used, value_dim), float32)
    next_piece = words.ctypes.data
    ends = carray(_pointer(next_piece + 8 * TASK_LENGTH), (n_rows, 2), int64)
    finished = ends.ctypes.data + 16 * n_rows
    columns = -(-used // LANES) * LANES
    shape = (n_rows * n_heads, n_pieces, value_dim + 3, columns)
    parts = carray(_pointer(words[PARTS]), shape, float32)
    queries = np.zeros((key_dim, columns), np.float32)
    scores = np.empty((BLOCK, columns), np.float32)
    widened = np.empty((BLOCK, max(key_dim, value_dim)), np.float32)
    claimed = add_to_shared(next_piece, 1)
    while claimed < n_rows * n_heads * n_pieces:
        text, piece = divmod(claimed, n_pieces)
        row, head = divmod(text, n_heads)
        for column in range(used):
            for i in range(key_dim):
                queries[i, column] = query[text, column, i]
        part = parts[text, piece]
        part[:] = 0
        part[value_dim] = _LOWEST
        first = ends[row, 0] + PIECE * piece
        end = min(first + PIECE, ends[row, 1])
        for start in range(first, end, BLOCK):
            count = min(BLOCK, end - start)
            _attend(words, row, head, start, count, queries, scores, widened, part)
        if add_to_shared(finished + 8 * text, 1) == n_pieces - 1:
            merged, total = _merge(parts[text], value_dim)
            total[total == 0] = 1  # no finite score: the sums are 0, and so is torch's output
            for column in range(used):
                for i in range(value_dim):
                    output[text, column, i] = merged[i, column] / total[column]
        claimed = add_to_shared(next_piece, 1)


@njit
def _attend(words, row, head, start, count, queries, scores, widened, part):
    """Adds `count` slots to a part `(value_dim + 3, columns)`: the weighted sums of values, the
    best score of each query, the sum of its weights, and the factor of earlier ones."""
    value_dim = words[VALUE_DIM]
    size = 2 if words[BFLOAT16] != 0 else 4
    key_step, value_step = size * words[KEY_SLOT], size * words[VALUE_SLOT]
    keys = words[KEY] + size * (row * words[KEY_ROW] + head * words[KEY_HEAD])
    values = words[VALUE] + size * (row * words[VALUE_ROW] + head * words[VALUE_HEAD])
    keys += start * key_step
    values += start * value_step
    following = keys + count * key_step
    scores[:] = 0
    if size == 2:
        keys, key_step = _widen(keys, words[KEY_SLOT], count, words[KEY_DIM], widened)
    _multiply(keys, key_step, 4, count, queries, words[KEY_DIM], scores, values, size)
    if words[MASK] != 0:
        _hide(words, row, start, count, scores)
    _weigh(scores, count, part[value_dim:])
    factors = part[value_dim + 2]
    for i in range(value_dim):
        for column in range(len(factors)):
            part[i, column] *= factors[column]
    if size == 2:
        values, value_step = _widen(values, words[VALUE_SLOT], count, value_dim, widened)
    _multiply(values, 4, value_step, value_dim, scores, count, part, following, size)


@njit
def _widen(address, step, count, dim, widened):
    """The address of a copy of bfloat16 numbers `(count, dim)`, and the bytes between its lines."""
    numbers = carray(_pointer(address), (count, step), uint16)
    bits = widened.view(np.int32)
    for slot in range(count):
        for i in range(dim):
            bits[slot, i] = int32(numbers[slot, i]) << int32(16)
    return widened.ctypes.data, 4 * widened.shape[1]


@njit
def _multiply(a, a_row, a_step, n_rows, b, count, c, ahead, size):
    """`c += a @ b`, where a is `(n_rows, count)` and b `(count, columns)`. Fetches `n_rows * count`
    numbers of this size that are needed next."""
    line = 4 * c.shape[1]
    for at in range(0, line, 4 * LANES):
        b_at = b.ctypes.data + at
        row = 0
        while row < n_rows:
            rows = ROWS if row + ROWS <= n_rows else 1
            a_at = a + row * a_row
            c_at = c.ctypes.data + row * line + at
            next_at = ahead + row * count * size
            _multiply_tile(rows, a_at, a_row, a_step, b_at, c_at, line, count, next_at, rows * size)
            row += rows


@njit
def _hide(words, row, start, count, scores):
    """Sets the scores of slots that a token does not see to minus infinity."""
    tokens = words[TOKENS]
    for token in range(tokens):
        first = row * words[MASK_ROW] + token * words[MASK_TOKEN] + start
        mask = carray(_pointer(words[MASK] + first), count, uint8)
        for slot in range(count):
            if mask[slot] == 0:
                scores[slot, token : words[GROUPS] * tokens : tokens] = -np.inf


@njit
def _weigh(scores, count, sums):
    """Turns scores `(count, columns)` into weights, see `_weigh_tile`."""
    line = 4 * scores.shape[1]
    for at in range(0, line, 4 * LANES):
        _weigh_tile(scores.ctypes.data + at, line, count, sums.ctypes.data + at)


@njit
def _merge(parts, value_dim):
    """The weighted sums of the values of all pieces, and the sums of weights."""
    weights = parts[:, value_dim].copy()
    merged = np.zeros_like(parts[0])
    merged[value_dim] = _LOWEST
    _weigh(weights, len(parts), merged[value_dim:])
    merged[:] = 0
    for piece in range(len(parts)):
        for i in range(value_dim + 2):
            for column in range(merged.shape[1]):
                merged[i, column] += weights[piece, column] * parts[piece, i, column]
    return merged, merged[value_dim + 1]
