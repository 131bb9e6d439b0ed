"""Eight numbers at a time, or sixteen, and memory asked for ahead of its use, for numba kernels.

numba leaves to LLVM what becomes a vector instruction, and LLVM vectorises sums along a row: each
sum ends with a reduction, and a row is waited for. With these a kernel can keep sums for eight
queries side by side while the next rows are on their way. They are LLVM's own vectors: it makes of
them what the processor has.
"""

# mypy: disallow-untyped-defs=False
# An intrinsic's function is numba's: types go in, and a signature with what generates the code
# comes out.

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

LANES = 8

_int32 = ir.IntType(32)


class _Lanes(types.Type):
    def __init__(self, count) -> None:
        super().__init__(name=f"Lanes({count})")
        self.vector = ir.VectorType(ir.FloatType(), count)


_lanes, _joined_lanes = _Lanes(LANES), _Lanes(2 * LANES)
_vector = _lanes.vector


@register_model(_Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, data_model_manager, numba_type) -> None:
        super().__init__(data_model_manager, numba_type, numba_type.vector)


@njit
def side_by_side(rows):
    """Rows, `(n, d)` float32, in groups of eight, `(groups, d, 8)`; the last is filled up with
    zeros."""
    groups = -(-len(rows) // LANES)
    lanes = np.zeros((groups, rows.shape[1], LANES), dtype=np.float32)
    for i in range(len(rows)):
        lanes[i // LANES, :, i % LANES] = rows[i]
    return lanes


@intrinsic
def lanes_of(typing_context, number):
    """A float32 number, eight times."""

    def generate(context, builder, signature, arguments):
        return _spread(builder, arguments[0], _vector)

    return _lanes(types.float32), generate


@intrinsic
def load_lanes(typing_context, array, row):
    """A row of a float32 array of shape `(n, 8)`."""

    def generate(context, builder, signature, arguments):
        loaded = builder.load(_row_pointer(context, builder, signature, arguments))
        loaded.align = 4  # an array begins wherever a float32 may
        return loaded

    return _lanes(array, types.intp), generate


@intrinsic
def store_lanes(typing_context, array, row, lanes):
    """Writes a row of a float32 array of shape `(n, 8)`."""

    def generate(context, builder, signature, arguments):
        pointer = _row_pointer(context, builder, signature, arguments)
        builder.store(arguments[2], pointer).align = 4
        return context.get_dummy_value()

    return types.void(array, types.intp, _lanes), generate


@intrinsic
def join_lanes(typing_context, lanes, others):
    """Sixteen numbers, of which a processor may have vectors as well: eight, and eight others."""

    def generate(context, builder, signature, arguments):
        return builder.shuffle_vector(*arguments, _places(range(2 * LANES)))

    return _joined_lanes(_lanes, _lanes), generate


@intrinsic
def first_lanes(typing_context, joined):
    """The first eight of sixteen numbers."""
    return _lanes(_joined_lanes), _half(range(LANES))


@intrinsic
def second_lanes(typing_context, joined):
    """The others of sixteen numbers."""
    return _lanes(_joined_lanes), _half(range(LANES, 2 * LANES))


@intrinsic
def add_products(typing_context, sums, number, lanes):
    """`sums + number * lanes`, eight or sixteen of them, for a float32 number: rounded once where
    the processor multiplies and adds in one, else twice."""
    if isinstance(sums, _Lanes):
        return sums(sums, types.float32, sums), _product_added(("contract",))
    return None


@intrinsic
def add_rounded_products(typing_context, sums, number, lanes):
    """The same, always rounded twice, as by the same operations on single numbers."""
    return _lanes(_lanes, types.float32, _lanes), _product_added(())


@intrinsic
def smaller_lanes(typing_context, lanes, others):
    """The smaller number of each lane."""
    return _lanes(_lanes, _lanes), _chosen_by("<")


@intrinsic
def larger_lanes(typing_context, lanes, others):
    """The larger number of each lane."""
    return _lanes(_lanes, _lanes), _chosen_by(">")


@intrinsic
def fetch_ahead(typing_context, array, row, column):
    """Has an element of a two-dimensional array, and what stands next to it, brought into the
    second-level cache. It may lie outside the array: then nothing happens."""

    def generate(context, builder, signature, arguments):
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        pointer = cgutils.get_item_pointer(
            context, builder, signature.args[0], array, arguments[1:]
        )
        pointer = builder.bitcast(pointer, cgutils.voidptr_t)
        prefetch = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, _int32, _int32, _int32]),
            "llvm.prefetch.p0i8",
        )
        to_read, into_second_level, data = _int32(0), _int32(2), _int32(1)
        builder.call(prefetch, [pointer, to_read, into_second_level, data])
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp), generate


def _product_added(flags):
    def generate(context, builder, signature, arguments):
        sums, number, lanes = arguments
        products = builder.fmul(_spread(builder, number, lanes.type), lanes, flags=flags)
        return builder.fadd(sums, products, flags=flags)

    return generate


def _chosen_by(comparison):
    def generate(context, builder, signature, arguments):
        return builder.select(builder.fcmp_ordered(comparison, *arguments), *arguments)

    return generate


def _half(places):
    def generate(context, builder, signature, arguments):
        (joined,) = arguments
        return builder.shuffle_vector(joined, _undefined(joined.type), _places(places))

    return generate


def _spread(builder, number, vector):
    undefined = _undefined(vector)
    first = builder.insert_element(undefined, number, _int32(0))
    return builder.shuffle_vector(first, undefined, _places([0] * vector.count))


def _undefined(vector):
    return ir.Constant(vector, ir.Undefined)


def _places(places):
    return ir.Constant(ir.VectorType(_int32, len(places)), list(places))


def _row_pointer(context, builder, signature, arguments):
    array = context.make_array(signature.args[0])(context, builder, arguments[0])
    offset = builder.mul(arguments[1], arguments[1].type(LANES))
    return builder.bitcast(builder.gep(array.data, [offset]), _vector.as_pointer())
