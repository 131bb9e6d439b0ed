"""Products of a few tokens with a layer's weights, at the speed at which memory yields the weights.

`y = x @ weight.T + bias` for up to about 32 rows of `x`, in float32 or bfloat16. A matrix product
that is made for hundreds of rows takes two to four times as long for 4 to 16 as for one. Here a
tile of `ROWS` rows of the weights and `TOKENS` rows of `x` keeps its sums in vector registers while
the next rows of the weights are fetched. LLVM would not find that in plain loops, so a tile is
written in LLVM's instructions. Products of bfloat16 are summed in float32.

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
# They multiply bfloat16 faster, at any number of tokens.
MATRIX_UNITS = "+amx-bf16" in _features
# True if one instruction multiplies pairs of bfloat16.
_PAIRS = "+avx512bf16" in _features

# Of 32 registers 24 hold sums and 7 what is multiplied; where there are 16, 12 and 4.
LANES, ROWS = (16, 6) if "+avx512f" in _features else (8, 3)
TOKENS = 4
INNER_MULTIPLE = 32
_CLAIMED_ROWS = 8 * ROWS

# What a task holds, as int64: the next row to claim, addresses, the bytes from one bias to the next
# (0 where all are the zero at `BIAS`), sizes, and 1 if the numbers are bfloat16.
NEXT_ROW, WEIGHT, X, Y, BIAS, BIAS_STEP, INNER, OUTER, N_TOKENS, BFLOAT16 = range(10)
TASK_LENGTH = 10

# A tile's variants, for each kind of numbers: 1 to `TOKENS` tokens, the first of a pass, which
# fetch the next rows of the weights, and `TOKENS` further ones, for which that is done.
_VARIANTS = [(tokens, True) for tokens in range(1, TOKENS + 1)] + [(TOKENS, False)]
_N_VARIANTS = len(_VARIANTS)

_i16 = ir.IntType(16)
_i32 = ir.IntType(32)
_i64 = ir.IntType(64)
_f32 = ir.FloatType()
_sums = ir.VectorType(_f32, LANES)
_bits = ir.VectorType(_i32, LANES)
_pointer = ir.IntType(8).as_pointer()


class _BFloat16(ir.Type):
    """LLVM's type, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"


_bfloat16_pairs = ir.VectorType(_BFloat16(), 2 * LANES)


class _Tile:
    """Emits a tile's instructions."""

    def __init__(self, builder: Any, bfloat16: bool):
        self._builder = builder
        self._bfloat16 = bfloat16
        self._size = 2 if bfloat16 else 4
        self._number = _i16 if bfloat16 else _f32
        self._pairs = bfloat16 and _PAIRS
        self._operand = _bfloat16_pairs if self._pairs else ir.VectorType(self._number, LANES)

    def emit(self, tokens: int, fetches: bool, arguments: Any) -> None:
        builder = self._builder
        weight, following, x, y, bias, bias_step, inner, outer = arguments
        row_bytes = builder.mul(inner, _i64(self._size))
        weight_rows = [self._step(weight, row_bytes, row) for row in range(ROWS)]
        x_rows = [self._step(x, row_bytes, token) for token in range(tokens)]
        ahead = builder.sub(following, weight)

        before = builder.block
        loop = builder.append_basic_block("loop")
        after = builder.append_basic_block("after")
        builder.branch(loop)
        builder.position_at_end(loop)
        at = builder.phi(_i64)
        totals = [[builder.phi(_sums) for _ in x_rows] for _ in weight_rows]
        weights = []
        for weight_row in weight_rows:
            address = builder.add(weight_row, at)
            if fetches:
                self._fetch(builder.add(address, ahead))
            weights.append(self._load(address, self._operand))
        for token, x_row in enumerate(x_rows):
            xs = self._load(builder.add(x_row, at), self._operand)
            for row_totals, row_weights in zip(totals, weights, strict=True):
                total = row_totals[token]
                total.add_incoming(ir.Constant(_sums, [0.0] * LANES), before)
                row_totals[token] = self._multiply_add(row_weights, xs, total)
                total.add_incoming(row_totals[token], loop)
        next_at = builder.add(at, _i64(self._operand.count * self._size))
        at.add_incoming(_i64(0), before)
        at.add_incoming(next_at, loop)
        builder.cbranch(builder.icmp_signed("<", next_at, row_bytes), loop, after)

        builder.position_at_end(after)
        biases = [self._load(self._step(bias, bias_step, row), self._number) for row in range(ROWS)]
        for token in range(tokens):
            y_row = self._step(y, builder.mul(outer, _i64(self._size)), token)
            for row, row_totals in enumerate(totals):
                total = builder.fadd(self._sum_lanes(row_totals[token]), biases[row])
                self._store(total, self._step(y_row, _i64(self._size), row))

    def _step(self, address: Any, step: Any, count: int) -> Any:
        return self._builder.add(address, self._builder.mul(step, _i64(count)))

    def _fetch(self, address: Any) -> None:
        options = [_i32(0), _i32(3), _i32(1)]  # to read data, from the nearest cache
        pointer = self._builder.inttoptr(address, _pointer)
        self._call("llvm.prefetch.p0", ir.VoidType(), [pointer, *options])

    def _load(self, address: Any, kind: Any) -> Any:
        """A number, or an operand; bfloat16 as float32, except for the instruction of pairs."""
        builder = self._builder
        loaded = builder.load(builder.inttoptr(address, kind.as_pointer()), align=self._size)
        if kind == _i16:
            return builder.bitcast(builder.shl(builder.zext(loaded, _i32), _i32(16)), _f32)
        if self._bfloat16 and not self._pairs:
            shift = ir.Constant(_bits, [16] * LANES)
            return builder.bitcast(builder.shl(builder.zext(loaded, _bits), shift), _sums)
        return loaded

    def _multiply_add(self, weights: Any, xs: Any, total: Any) -> Any:
        if self._pairs:
            name = "llvm.x86.avx512bf16.dpbf16ps.512"
            return self._call(name, _sums, [total, weights, xs])
        return self._call(f"llvm.fma.v{LANES}f32", _sums, [weights, xs, total])

    def _sum_lanes(self, vector: Any) -> Any:
        # In any order: the compiler adds as a tree does, alike for all sums.
        name = f"llvm.vector.reduce.fadd.v{LANES}f32"
        return self._call(name, _f32, [_f32(0.0), vector], fastmath=["reassoc"])

    def _call(self, name: str, result: Any, operands: list[Any], **options: Any) -> Any:
        """Calls one of LLVM's own functions."""
        kind = ir.FunctionType(result, [operand.type for operand in operands])
        function = cgutils.get_or_insert_function(self._builder.module, kind, name)
        return self._builder.call(function, operands, **options)

    def _store(self, number: Any, address: Any) -> None:
        builder = self._builder
        if self._bfloat16:  # the nearest one, the even one of two
            bits = builder.bitcast(number, _i32)
            odd = builder.and_(builder.lshr(bits, _i32(16)), _i32(1))
            bits = builder.add(bits, builder.add(odd, _i32(0x7FFF)))
            number = builder.trunc(builder.lshr(bits, _i32(16)), _i16)
        pointer = builder.inttoptr(address, self._number.as_pointer())
        builder.store(number, pointer, align=self._size)


@intrinsic
def _tile(typing, variant, weight, following, x, y, bias, bias_step, inner, outer):
    """`ROWS` rows of `y`'s columns, by one of the variants."""

    def emit(context, builder, signature, arguments):
        done = builder.append_basic_block("done")
        switch = builder.switch(arguments[0], done)
        for number, (tokens, fetches) in enumerate(_VARIANTS * 2):
            block = builder.append_basic_block("variant")
            switch.add_case(_i64(number), block)
            builder.position_at_end(block)
            tile = _Tile(builder, bfloat16=number >= _N_VARIANTS)
            tile.emit(tokens, fetches, arguments[1:])
            builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return types.void(*[int64] * 9), emit


@intrinsic
def _claim_rows(typing, task):
    """The first of the next `_CLAIMED_ROWS` rows, which no other thread gets."""

    def emit(context, builder, signature, arguments):
        next_row = builder.bitcast(arguments[0], _i64.as_pointer())
        return builder.atomic_rmw("add", next_row, _i64(_CLAIMED_ROWS), "monotonic")

    return int64(types.voidptr), emit


@kernel("void(voidptr)", drafts=SUPPORTED)
def narrow_product(task):
    """Takes part in the task at an address, see `NEXT_ROW`; several threads run it at once."""
    words = carray(task, TASK_LENGTH, int64)
    size = 2 if words[BFLOAT16] else 4
    bias_step = words[BIAS_STEP]
    inner = words[INNER]
    outer = words[OUTER]
    n_tokens = words[N_TOKENS]
    row_bytes = inner * size
    first = _N_VARIANTS if words[BFLOAT16] else 0
    row = _claim_rows(task)
    while row < outer:
        following = row + ROWS
        if following % _CLAIMED_ROWS == 0:
            following = _claim_rows(task)
        start = min(row, outer - ROWS)  # the last tile computes some rows again
        weight = words[WEIGHT] + start * row_bytes
        bias = words[BIAS] + start * bias_step
        ahead = words[WEIGHT] + min(following, outer - ROWS) * row_bytes
        for token in range(0, n_tokens, TOKENS):
            tokens = min(TOKENS, n_tokens - token)
            variant = tokens if token > 0 and tokens == TOKENS else tokens - 1
            x = words[X] + token * row_bytes
            y = words[Y] + (token * outer + start) * size
            _tile(first + variant, weight, ahead, x, y, bias, bias_step, inner, outer)
        row = following
