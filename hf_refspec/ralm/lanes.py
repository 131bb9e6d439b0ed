"""Eight numbers at a time, and memory asked for ahead of its use, for numba kernels.

numba leaves to LLVM what becomes a vector instruction, and LLVM vectorises sums along a row: each
sum ends with a reduction, and a row is waited for. With these a kernel can keep sums for eight
queries side by side while the next rows are on their way. They are LLVM's own vectors: it makes of
them what the processor has.
"""

# mypy: disallow-untyped-defs=False
# An intrinsic's function is numba's: types go in, and a signature with what generates the code
# comes out.

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

LANES = 8

_vector = ir.VectorType(ir.FloatType(), LANES)
_undefined = ir.Constant(_vector, ir.Undefined)
_int32 = ir.IntType(32)
# The sum may be rounded once, where the processor multiplies and adds in one.
_CONTRACT = ("contract",)


class _Lanes(types.Type):
    def __init__(self) -> None:
        super().__init__(name="Lanes")


_lanes = _Lanes()


@register_model(_Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, data_model_manager, numba_type) -> None:
        super().__init__(data_model_manager, numba_type, _vector)


@intrinsic
def lanes_of(typing_context, number):
    """A float32 number, eight times."""

    def generate(context, builder, signature, arguments):
        return _spread(builder, arguments[0])

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
def add_products(typing_context, sums, number, lanes):
    """`sums + number * lanes`, for a float32 number."""

    def generate(context, builder, signature, arguments):
        sums, number, lanes = arguments
        products = builder.fmul(_spread(builder, number), lanes, flags=_CONTRACT)
        return builder.fadd(sums, products, flags=_CONTRACT)

    return _lanes(_lanes, types.float32, _lanes), generate


@intrinsic
def smaller_lanes(typing_context, lanes, others):
    """The smaller number of each lane."""

    def generate(context, builder, signature, arguments):
        return builder.select(builder.fcmp_ordered("<", *arguments), *arguments)

    return _lanes(_lanes, _lanes), generate


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


def _spread(builder, number):
    first = builder.insert_element(_undefined, number, _int32(0))
    everywhere = ir.Constant(ir.VectorType(_int32, LANES), [0] * LANES)
    return builder.shuffle_vector(first, _undefined, everywhere)


def _row_pointer(context, builder, signature, arguments):
    array = context.make_array(signature.args[0])(context, builder, arguments[0])
    offset = builder.mul(arguments[1], arguments[1].type(LANES))
    return builder.bitcast(builder.gep(array.data, [offset]), _vector.as_pointer())
