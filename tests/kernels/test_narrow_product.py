"""The kernel for narrow products, against plain Python."""

import ctypes
import threading
from operator import mul

import numpy as np
import pytest

from hf_refspec.kernels import narrow_product as kernel
from hf_refspec.kernels.narrow_product import narrow_product

pytestmark = pytest.mark.skipif(not kernel.SUPPORTED, reason="needs AVX2 and FMA")

SIZES = [(1, 32, 6), (2, 64, 7), (3, 96, 13), (4, 32, 48), (7, 64, 97), (32, 160, 100)]


def product(x, weight, bias):
    """The twin: `y = x @ weight.T + bias`."""
    rows = [*zip(weight, bias, strict=True)]
    return [[sum(map(mul, token, row)) + constant for row, constant in rows] for token in x]


def stored(numbers, bfloat16):
    """Small integers, which bfloat16 holds, as the kernel reads them."""
    numbers = np.asarray(numbers, np.float32)
    return (numbers.view(np.uint32) >> 16).astype(np.uint16) if bfloat16 else numbers


KINDS = {"float32": kernel.FLOAT32, "uint16": kernel.BFLOAT16, "int8": kernel.INT8}


def run(x, weight, bias, scale=None, n_threads=1):
    operands = [np.ascontiguousarray(numbers) for numbers in (weight, x, bias)]
    y = np.zeros((len(x), len(weight)), x.dtype)
    task = (ctypes.c_int64 * kernel.TASK_LENGTH)()
    task[kernel.WEIGHT], task[kernel.X], task[kernel.BIAS] = (
        numbers.ctypes.data for numbers in operands
    )
    if scale is not None:
        task[kernel.SCALE] = scale.ctypes.data
    task[kernel.Y] = y.ctypes.data
    task[kernel.BIAS_STEP] = y.itemsize
    task[kernel.OUTER], task[kernel.INNER] = operands[0].shape
    task[kernel.N_TOKENS] = len(x)
    task[kernel.KIND] = KINDS[str(weight.dtype)]
    narrow_product.compile()
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(narrow_product.address)
    threads = [
        threading.Thread(target=function, args=(ctypes.addressof(task),)) for _ in range(n_threads)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return y


@pytest.mark.parametrize("bfloat16", [False, True])
@pytest.mark.parametrize("tokens, inner, outer", SIZES)
def test_products_of_small_integers_are_those_of_plain_python(tokens, inner, outer, bfloat16):
    rng = np.random.default_rng(tokens)
    x, weight = rng.integers(-1, 2, (tokens, inner)), rng.integers(-1, 2, (outer, inner))
    bias = rng.integers(-9, 10, outer)
    operands = [stored(numbers, bfloat16) for numbers in (x, weight, bias)]
    wanted = product(x.tolist(), weight.tolist(), bias.tolist())
    assert run(*operands).tolist() == stored(wanted, bfloat16).tolist()


@pytest.mark.parametrize("tokens, inner, outer", SIZES)
def test_int8_weights_are_scaled_by_row_as_by_plain_python(tokens, inner, outer):
    rng = np.random.default_rng(tokens)
    x = rng.integers(-3, 4, (tokens, inner))
    weight = rng.integers(-128, 128, (outer, inner))
    scale, bias = 2.0 ** rng.integers(-8, 3, outer), rng.integers(-9, 10, outer)
    wanted = product(x.tolist(), (weight * scale[:, None]).tolist(), bias.tolist())
    x, scale, bias = (stored(numbers, False) for numbers in (x, scale, bias))
    assert run(x, weight.astype(np.int8), bias, scale).tolist() == wanted


@pytest.mark.parametrize("int8", [False, True])
def test_a_product_has_the_same_bits_whatever_the_other_tokens_and_threads(int8):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((32, 320), np.float32)
    weight = rng.standard_normal((1000, 320), np.float32)
    bias = rng.standard_normal(1000, np.float32)
    scale = None
    if int8:
        scale = np.abs(weight).max(axis=1) / np.float32(127)
        weight = np.round(weight / scale[:, None]).astype(np.int8)
    alone = np.concatenate([run(x[token : token + 1], weight, bias, scale) for token in range(32)])
    for tokens in (2, 3, 5, 8, 32):
        for n_threads in (1, 3):
            y = run(x[:tokens], weight, bias, scale, n_threads)
            assert y.tobytes() == alone[:tokens].tobytes()
    exact = x.astype(np.float64) @ weight.T.astype(np.float64)
    exact = (exact if scale is None else exact * scale) + bias
    assert np.allclose(alone, exact, atol=1e-4)


def test_a_bfloat16_sum_is_rounded_to_the_nearest_and_to_even():
    x, weight = np.zeros((1, 32)), np.zeros((6, 32))
    x[0, :2] = 1
    weight[:, 0] = 256
    weight[:, 1] = [0, 1, 2, 3, 4, 5]  # bfloat16 has no odd numbers there
    y = run(stored(x, True), stored(weight, True), stored(np.zeros(6), True))
    wanted = stored([[256, 256, 258, 260, 260, 260]], True)
    assert y.tolist() == wanted.tolist()


def test_infinities_and_nan_stay():
    x, weight = np.ones((2, 32)), np.ones((6, 32))
    weight[:3, 5] = [np.inf, -np.inf, np.nan]
    for bfloat16 in (False, True):
        operands = [stored(numbers, bfloat16) for numbers in (x, weight, np.zeros(6))]
        y = run(*operands)
        values = (y.astype(np.uint32) << 16).view(np.float32) if bfloat16 else y
        assert np.array_equal(values, [[np.inf, -np.inf, np.nan, 32, 32, 32]] * 2, equal_nan=True)
