"""Products of a few tokens with a layer's weights, at the speed at which memory yields the weights.

`y = x @ weight.T + bias` for up to about 32 rows of `x`, in float32 or bfloat16; or in float32 with
weights in int8, `y = (x @ weight.T) * scale + bias`. A matrix product that is made for hundreds of
rows takes two to four times as long for 4 to 16 as for one. Here a tile of `ROWS` rows of the
weights and `TOKENS` rows of `x` keeps its sums in vector registers while the next rows of the
weights are fetched. LLVM would not find that in plain loops, so a tile is written in LLVM's
instructions. Products of bfloat16 are summed in float32.

Each sum has one accumulator, so its bits depend on its own row of `x` and of the weights alone: not
on other tokens, nor on the number of threads. The threads share a task, and claim rows from it.
"""

from __future__ import annotations

from typing import Any

from llvmlite import binding, ir
from numba import carray, config, int64, types
from numba.core import cgutils
from numba.core.codegen import get_host_cpu_features
from numba.extending import intrinsic

from .kernel import kernel

_features = (config.CPU_FEATURES or get_host_cpu_features()).split(",")
SUPPORTED = {"+avx2", "+fma"} <= {*_features} and binding.llvm_version_info >= (16, 0, 0)
# torch multiplies bfloat16 by them, and the faster the more tokens there are.
MATRIX_UNITS = "+amx-bf16" in _features
# True if one instruction multiplies pairs of bfloat16.
_PAIRS = "+avx512bf16" in _features

# 24 of 32 registers hold sums and 7 the factors; where there are 16, 12 and 4.
LANES, ROWS = (16, 6) if "+avx512f" in _features else (8, 3)
TOKENS = 4
INNER_MULTIPLE = 32
_CLAIMED_ROWS = 8 * ROWS

# A task, as int64: the next row to claim, addresses, the bytes from one bias to the next
# (0 where all are the zero at `BIAS`), sizes, and the kind of the numbers. Its writer fills it in
# this order, see `_computed` in pass_kernels.py; the next row must come first.
NEXT_ROW, WEIGHT, SCALE, X, Y, BIAS, BIAS_STEP, INNER, OUTER, N_TOKENS, KIND = range(11)
TASK_LENGTH = 11
# The kinds: all numbers are of one type, or int8 weights stand beside float32 numbers.
FLOAT32, BFLOAT16, INT8 = range(3)
_WEIGHT_SIZES = (4, 2, 1)  # of a weight, in bytes
_SIZES = (4, 2, 4)  # of any other number

_i8 = ir.IntType(8)
_i16 = ir.IntType(16)
I32 = ir.IntType(32)
I64 = ir.IntType(64)
F32 = ir.FloatType()
VECTOR = ir.VectorType(F32, LANES)
BITS = ir.VectorType(I32, LANES)


def _call(builder: Any, name: str, result: Any, *operands: Any, **options: Any) -> Any:
    """Calls one of LLVM's own functions."""
    kind = ir.FunctionType(result, [operand.type for operand in operands])
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(function, operands, **options)


def multiply_add(builder: Any, a: Any, b: Any, total: Any) -> Any:
    """`a * b + total` of vectors."""
    return _call(builder, f"llvm.fma.v{LANES}f32", VECTOR, a, b, total)


def fetch_line(builder: Any, address: Any) -> None:
    """Prefetches a line into the second-level cache: the nearest holds less than two tiles."""
    pointer = builder.inttoptr(address, _i8.as_pointer())
    _call(builder, "llvm.prefetch.p0", ir.VoidType(), pointer, I32(0), I32(2), I32(1))


class _BFloat16(ir.Type):
    """LLVM's type, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"


_bfloat16_pairs = ir.VectorType(_BFloat16(), 2 * LANES)


class _Tile:
    """Emits a tile's instructions for one kind of numbers."""

    def __init__(self, builder: Any, kind: int):
        self._builder = builder
        self._kind = kind
        self._size = _SIZES[kind]
        self._weight_size = _WEIGHT_SIZES[kind]
        self._number = _i16 if kind == BFLOAT16 else F32
        self._pairs = kind == BFLOAT16 and _PAIRS
        self._operand = _bfloat16_pairs if self._pairs else ir.VectorType(self._number, LANES)
        self._weights = ir.VectorType(_i8, LANES) if kind == INT8 else self._operand

    def emit(self, tokens: int, arguments: Any) -> None:
        """Multiplies `tokens` rows of `x` by `ROWS` rows of the weights, and fetches one of `parts`
        of the next `ROWS` rows, from the address `fetched` on: all tiles of a pass share the work,
        so that memory is never idle."""
        builder = self._builder
        weight, fetched, parts, scale, x, y, bias, bias_step, inner, outer = arguments
        weight_step = builder.mul(inner, I64(self._weight_size))
        x_step = builder.mul(inner, I64(self._size))
        weight_rows = [self._step(weight, weight_step, row) for row in range(ROWS)]
        x_rows = [self._step(x, x_step, token) for token in range(tokens)]
        count = self._operand.count
        # An iteration takes several vectors of int8, to fetch a line of 64 bytes less often.
        vectors = INNER_MULTIPLE // count if self._kind == INT8 else 1
        fetched_bytes = builder.sdiv(I64(vectors * count * self._weight_size), parts)

        before = builder.block
        loop = builder.append_basic_block("loop")
        after = builder.append_basic_block("after")
        builder.branch(loop)
        builder.position_at_end(loop)
        at = builder.phi(I64)  # the numbers of a row that are done
        fetch = builder.phi(I64)
        phis = [[builder.phi(VECTOR) for _ in x_rows] for _ in weight_rows]
        totals = [[*row_phis] for row_phis in phis]
        for row in range(ROWS):
            fetch_line(builder, self._step(fetch, weight_step, row))
        for vector in range(vectors):
            here = builder.add(at, I64(vector * count))
            weights = []
            for weight_row in weight_rows:
                address = builder.add(weight_row, builder.mul(here, I64(self._weight_size)))
                weights.append(self._load(address, self._weights))
            for token, x_row in enumerate(x_rows):
                address = builder.add(x_row, builder.mul(here, I64(self._size)))
                xs = self._load(address, self._operand)
                for row_totals, row_weights in zip(totals, weights, strict=True):
                    row_totals[token] = self._multiply_add(row_weights, xs, row_totals[token])
        for row_phis, row_totals in zip(phis, totals, strict=True):
            for phi, total in zip(row_phis, row_totals, strict=True):
                phi.add_incoming(ir.Constant(VECTOR, [0.0] * LANES), before)
                phi.add_incoming(total, loop)
        next_at = builder.add(at, I64(vectors * count))
        at.add_incoming(I64(0), before)
        at.add_incoming(next_at, loop)
        fetch.add_incoming(fetched, before)
        fetch.add_incoming(builder.add(fetch, fetched_bytes), loop)
        builder.cbranch(builder.icmp_signed("<", next_at, inner), loop, after)

        builder.position_at_end(after)
        biases = [self._load(self._step(bias, bias_step, row), self._number) for row in range(ROWS)]
        for token in range(tokens):
            y_row = self._step(y, builder.mul(outer, I64(self._size)), token)
            for row, row_totals in enumerate(totals):
                total = self._sum_lanes(row_totals[token])
                if self._kind == INT8:
                    of_row = self._load(self._step(scale, I64(self._size), row), F32)
                    total = builder.fmul(total, of_row)
                total = builder.fadd(total, biases[row])
                self._store(total, self._step(y_row, I64(self._size), row))

    def _step(self, address: Any, step: Any, count: int) -> Any:
        return self._builder.add(address, self._builder.mul(step, I64(count)))

    def _load(self, address: Any, kind: Any) -> Any:
        """A number, or an operand; bfloat16 and int8 as float32, except for the instruction of
        pairs."""
        builder = self._builder
        loaded = builder.load(builder.inttoptr(address, kind.as_pointer()), align=1)
        if kind == _i16:
            return builder.bitcast(builder.shl(builder.zext(loaded, I32), I32(16)), F32)
        if kind == ir.VectorType(_i8, LANES):
            return builder.sitofp(builder.sext(loaded, BITS), VECTOR)
        if self._kind == BFLOAT16 and not self._pairs:
            shift = ir.Constant(BITS, [16] * LANES)
            return builder.bitcast(builder.shl(builder.zext(loaded, BITS), shift), VECTOR)
        return loaded

    def _multiply_add(self, weights: Any, xs: Any, total: Any) -> Any:
        if self._pairs:
            name = "llvm.x86.avx512bf16.dpbf16ps.512"
            return _call(self._builder, name, VECTOR, total, weights, xs)
        return multiply_add(self._builder, weights, xs, total)

    def _sum_lanes(self, vector: Any) -> Any:
        # In any order: the compiler adds as a tree does, alike for all sums.
        name = f"llvm.vector.reduce.fadd.v{LANES}f32"
        return _call(self._builder, name, F32, F32(0.0), vector, fastmath=["reassoc"])

    def _store(self, number: Any, address: Any) -> None:
        builder = self._builder
        if self._kind == BFLOAT16:  # the nearest one, the even one of two
            bits = builder.bitcast(number, I32)
            odd = builder.and_(builder.lshr(bits, I32(16)), I32(1))
            bits = builder.add(bits, builder.add(odd, I32(0x7FFF)))
            number = builder.trunc(builder.lshr(bits, I32(16)), _i16)
        pointer = builder.inttoptr(address, self._number.as_pointer())
        builder.store(number, pointer, align=self._size)


@intrinsic
def _tile(typing, kind, tokens, weight, fetched, parts, scale, x, y, bias, bias_step, inner, outer):
    """`ROWS` of the columns of `y` for 1 to `TOKENS` tokens, see `_Tile.emit`."""

    def emit(context, builder, signature, arguments):
        kind, tokens, *others = arguments
        variants = builder.add(builder.mul(kind, I64(TOKENS)), tokens)
        done = builder.append_basic_block("done")
        switch = builder.switch(variants, done)
        for number in range(len(_SIZES) * TOKENS):
            block = builder.append_basic_block("variant")
            switch.add_case(I64(1 + number), block)
            builder.position_at_end(block)
            _Tile(builder, number // TOKENS).emit(1 + number % TOKENS, others)
            builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return types.void(*[int64] * 12), emit


@intrinsic
def add_to_shared(typing, address, count):
    """Adds to an int64 that threads share; returns the number before."""

    def emit(context, builder, signature, arguments):
        pointer = builder.inttoptr(arguments[0], I64.as_pointer())
        return builder.atomic_rmw("add", pointer, arguments[1], "acq_rel")

    return int64(int64, int64), emit


@kernel("void(voidptr)", drafts=SUPPORTED)
def narrow_product(task):
    """Takes part in the task at an address, see `NEXT_ROW`; several threads run it at once."""
    words = carray(task, TASK_LENGTH, int64)
    kind = words[KIND]
    size = _SIZES[kind]
    bias_step = words[BIAS_STEP]
    inner = words[INNER]
    outer = words[OUTER]
    n_tokens = words[N_TOKENS]
    row_bytes = inner * _WEIGHT_SIZES[kind]
    parts = -(-n_tokens // TOKENS)
    next_row = words.ctypes.data
    row = add_to_shared(next_row, _CLAIMED_ROWS)
    while row < outer:
        following = row + ROWS
        if following % _CLAIMED_ROWS == 0:
            following = add_to_shared(next_row, _CLAIMED_ROWS)
        start = min(row, outer - ROWS)  # the last tile computes some rows again
        weight = words[WEIGHT] + start * row_bytes
        scale = words[SCALE] + start * size
        bias = words[BIAS] + start * bias_step
        ahead = words[WEIGHT] + min(following, outer - ROWS) * row_bytes
        for part in range(parts):
            token = part * TOKENS
            tokens = min(TOKENS, n_tokens - token)
            fetched = ahead + part * row_bytes // parts
            x = words[X] + token * inner * size
            y = words[Y] + (token * outer + start) * size
            _tile(kind, tokens, weight, fetched, parts, scale, x, y, bias, bias_step, inner, outer)
        row = following
