"""Vector instructions and memory prefetch for numba kernels.

numba leaves to LLVM what becomes a vector instruction, and LLVM vectorises sums along a row: each sum
ends with a reduction, and a row is waited for. These intrinsics keep sums for 8 or 16 queries side by
side in registers while the next rows are on their way. They emit LLVM's own vectors, from which it
makes what the processor has.
"""

# mypy: disallow-untyped-defs=False
# An intrinsic's function is numba's: types go in, and a signature with what generates the code
# comes out.

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

# Rows ahead of their use that `products_of_tile` asks for.
_ROWS_AHEAD = 64
_FLOAT32_BYTES = 4  # an array begins wherever a float32 may, so that is all the alignment there is

_int32 = ir.IntType(32)


@njit
def side_by_side(rows, width):
    """Rows, `(n, d)` float32, in groups of `width` that lie side by side, `(groups, d, width)`; the
    last group is filled up with zeros."""
    groups = -(-len(rows) // width)
    lanes = np.zeros((groups, rows.shape[1], width), dtype=np.float32)
    for i in range(len(rows)):
        lanes[i // width, :, i % width] = rows[i]
    return lanes


@intrinsic
def add_scaled_row(typing_context, sums, row, number, rows, other):
    """`sums[row] += number * rows[other]` for float32 arrays of shape `(n, 8)`, each product rounded
    before it is added, as by the same operations on single numbers."""

    def generate(context, builder, signature, arguments):
        sums_type, _, _, rows_type, _ = signature.args
        sums, row, number, rows, other = arguments
        target = _row(context, builder, sums_type, sums, row, width=8)
        added = _load(builder, _row(context, builder, rows_type, rows, other, width=8))
        product = builder.fmul(_spread(builder, number, 8), added)
        _store(builder, builder.fadd(_load(builder, target), product), target)
        return context.get_dummy_value()

    return types.void(sums, types.intp, types.float32, rows, types.intp), generate


def products_of_tile(tile, width):
    """Makes the intrinsic that multiplies `tile` rows with `width` queries, in registers.

    Its arguments are `rows` (float32 of shape `(n, d)`), the first of the rows, the queries side by
    side (`(d, width)`), and the array (`(m, width)`) that gets the inner products, from its row
    `target` on. Sums are rounded once where the processor multiplies and adds in one instruction.
    """

    @intrinsic
    def products(typing_context, rows, first, queries, sums, target):
        def generate(context, builder, signature, arguments):
            rows_type, _, queries_type, sums_type, _ = signature.args
            rows, first, queries, sums, target = arguments

            def place(number, offset):
                return builder.add(number, ir.Constant(number.type, offset))

            starts = [
                _row(context, builder, rows_type, rows, place(first, i)) for i in range(tile)
            ]
            later = _row(context, builder, rows_type, rows, place(first, _ROWS_AHEAD))
            zero = ir.Constant(first.type, 0)
            of_queries = _row(context, builder, queries_type, queries, zero, width)
            totals = [
                cgutils.alloca_once_value(builder, ir.Constant(_vector(width), None))
                for _ in range(tile)
            ]
            rows_struct = context.make_array(rows_type)(context, builder, rows)
            dimension = builder.extract_value(rows_struct.shape, 1)
            with cgutils.for_range(builder, dimension) as loop:
                ahead = builder.mul(loop.index, ir.Constant(loop.index.type, tile))
                _prefetch(builder, builder.gep(later, [ahead]))
                some = _load(builder, builder.gep(of_queries, [loop.index]))
                for start, total in zip(starts, totals, strict=True):
                    number = builder.load(builder.gep(start, [loop.index]))
                    product = builder.fmul(_spread(builder, number, width), some, ("contract",))
                    builder.store(builder.fadd(builder.load(total), product, ("contract",)), total)
            for i, total in enumerate(totals):
                out = _row(context, builder, sums_type, sums, place(target, i), width)
                _store(builder, builder.load(total), out)
            return context.get_dummy_value()

        return types.void(rows, types.intp, queries, sums, types.intp), generate

    return products


@intrinsic
def fetch_ahead(typing_context, array, row, column):
    """Has an element of a two-dimensional array, and what stands next to it, brought into the
    second-level cache. It may lie outside the array: then nothing happens."""

    def generate(context, builder, signature, arguments):
        array, row, column = arguments
        start = _row(context, builder, signature.args[0], array, row)
        _prefetch(builder, builder.gep(start, [column]))
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp), generate


def _vector(width):
    return ir.VectorType(ir.FloatType(), width)


def _row(context, builder, array_type, array, row, width=None):
    """Where a row of a C-contiguous two-dimensional array begins: its first number, or its first
    `width` as a vector."""
    struct = context.make_array(array_type)(context, builder, array)
    place = [row, ir.Constant(row.type, 0)]
    pointer = cgutils.get_item_pointer(context, builder, array_type, struct, place)
    return pointer if width is None else builder.bitcast(pointer, _vector(width).as_pointer())


def _load(builder, pointer):
    loaded = builder.load(pointer)
    loaded.align = _FLOAT32_BYTES
    return loaded


def _store(builder, vector, pointer):
    builder.store(vector, pointer).align = _FLOAT32_BYTES


def _spread(builder, number, width):
    """A number in every lane."""
    undefined = ir.Constant(_vector(width), ir.Undefined)
    first = builder.insert_element(undefined, number, _int32(0))
    everywhere = ir.Constant(ir.VectorType(_int32, width), [0] * width)
    return builder.shuffle_vector(first, undefined, everywhere)


def _prefetch(builder, pointer):
    function = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, _int32, _int32, _int32]),
        "llvm.prefetch.p0i8",
    )
    to_read, into_second_level, data = _int32(0), _int32(2), _int32(1)
    pointer = builder.bitcast(pointer, cgutils.voidptr_t)
    builder.call(function, [pointer, to_read, into_second_level, data])
