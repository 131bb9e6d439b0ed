"""Vector instructions and memory prefetch for numba kernels.

numba leaves to LLVM what becomes a vector instruction, and LLVM vectorises sums along a row: each
sum ends with a reduction, and a row is waited for. These intrinsics keep sums for 8 or 16 queries
side by side in registers while the next rows are on their way. They emit LLVM's own vectors, which
it turns into the instructions that the processor has.
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
    grouped = np.zeros((groups, rows.shape[1], width), dtype=np.float32)
    for i in range(len(rows)):
        grouped[i // width, :, i % width] = rows[i]
    return grouped


@intrinsic
def add_scaled_row(typing_context, sums, row, number, rows, other):
    """`sums[row] += number * rows[other]` for float32 arrays of shape `(n, 8)`, each product
    rounded before it is added, as by the same operations on single numbers."""

    def generate(context, builder, signature, arguments):
        sums, row, number, rows, other = arguments
        sums = _Array(context, builder, signature.args[0], sums)
        rows = _Array(context, builder, signature.args[3], rows)
        target, added = sums.vector(row, 0, 8), _load(builder, rows.vector(other, 0, 8))
        product = builder.fmul(_spread(builder, number, 8), added)
        _store(builder, builder.fadd(_load(builder, target), product), target)
        return context.get_dummy_value()

    return types.void(sums, types.intp, types.float32, rows, types.intp), generate


def scores_of_tile(tile, width):
    """Makes the intrinsic that scores `tile` rows for `width` queries, in registers.

    A score is the row's offset plus its inner product with the query, its sum rounded once a step
    where the processor multiplies and adds in one instruction. Arguments of the intrinsic:

        rows (float32 of shape `(n, d)`), offsets (float32 of shape `(1, n)`)
        first (int): The first of the rows.
        queries (float32 of shape `(d, width)`): Side by side.
        scores (float32 of shape `(m, width)`): Gets the scores, from its row `target` on.
        highest (float32 of shape `(1, width)`): Is raised to the highest score of each query.
    """

    @intrinsic
    def scores_of(typing_context, rows, offsets, first, queries, scores, target, highest):
        def generate(context, builder, signature, arguments):
            rows, offsets, first, queries, scores, target, highest = (
                _Array(context, builder, *each) if isinstance(each[0], types.Array) else each[1]
                for each in zip(signature.args, arguments, strict=True)
            )
            starts = [rows.row(first, i) for i in range(tile)]
            later = rows.row(first, _ROWS_AHEAD)
            offset = builder.gep(offsets.row(_index(0)), [first])
            totals = [
                cgutils.alloca_once_value(
                    builder, _spread(builder, builder.load(builder.gep(offset, [_index(i)])), width)
                )
                for i in range(tile)
            ]
            of_queries = queries.vector(_index(0), 0, width)
            fused = ("contract",)  # one instruction where the processor has it
            with cgutils.for_range(builder, rows.columns) as loop:
                _prefetch(builder, builder.gep(later, [builder.mul(loop.index, _index(tile))]))
                some = _load(builder, builder.gep(of_queries, [loop.index]))
                for start, total in zip(starts, totals, strict=True):
                    number = builder.load(builder.gep(start, [loop.index]))
                    product = builder.fmul(_spread(builder, number, width), some, flags=fused)
                    total_now = builder.fadd(builder.load(total), product, flags=fused)
                    builder.store(total_now, total)
            best = highest.vector(_index(0), 0, width)
            largest = _load(builder, best)
            for i, total in enumerate(totals):
                score = builder.load(total)
                _store(builder, score, scores.vector(target, i, width))
                largest = builder.select(builder.fcmp_ordered(">", score, largest), score, largest)
            _store(builder, largest, best)
            return context.get_dummy_value()

        integer = types.intp
        return types.void(rows, offsets, integer, queries, scores, integer, highest), generate

    return scores_of


@intrinsic
def fetch_ahead(typing_context, array, row, column):
    """Has an element of a two-dimensional array, and what stands next to it, brought into the
    second-level cache. It may lie outside the array: then nothing happens."""

    def generate(context, builder, signature, arguments):
        array, row, column = arguments
        start = _Array(context, builder, signature.args[0], array).row(row)
        _prefetch(builder, builder.gep(start, [column]))
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp), generate


class _Array:
    """A C-contiguous two-dimensional array of float32, while code is generated."""

    def __init__(self, context, builder, array_type, array) -> None:
        self._context, self._builder, self._type = context, builder, array_type
        self._struct = context.make_array(array_type)(context, builder, array)

    @property
    def columns(self):
        return self._builder.extract_value(self._struct.shape, 1)

    def row(self, number, offset=0):
        """Where the row `number + offset` begins. It may lie outside."""
        place = [self._builder.add(number, _index(offset)), _index(0)]
        return cgutils.get_item_pointer(
            self._context, self._builder, self._type, self._struct, place
        )

    def vector(self, number, offset, width):
        """The same, as a vector of `width` numbers."""
        return self._builder.bitcast(self.row(number, offset), _vector(width).as_pointer())


def _index(number):
    return ir.Constant(ir.IntType(types.intp.bitwidth), number)


def _vector(width):
    return ir.VectorType(ir.FloatType(), width)


def _load(builder, pointer):
    loaded = builder.load(pointer)
    loaded.align = _FLOAT32_BYTES
    return loaded


def _store(builder, vector, pointer):
    builder.store(vector, pointer).align = _FLOAT32_BYTES


def _spread(builder, number, width):
    """A number `width` times."""
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
