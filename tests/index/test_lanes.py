from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from hf_refspec.index.lanes import (
    LANES,
    add_products,
    add_rounded_products,
    fetch_ahead,
    first_lanes,
    join_lanes,
    lanes_of,
    larger_lanes,
    load_lanes,
    second_lanes,
    side_by_side,
    smaller_lanes,
    store_lanes,
)


@njit
def products_added(numbers, rows, result):
    sums = lanes_of(np.float32(0.5))
    for i in range(len(numbers)):
        sums = add_products(sums, numbers[i], load_lanes(rows, i))
    store_lanes(result, 1, sums)


@njit
def joined_products_added(numbers, rows, result):
    zeros = lanes_of(np.float32(0))
    sums = join_lanes(zeros, zeros)
    for i in range(len(numbers)):
        both = join_lanes(load_lanes(rows, 2 * i), load_lanes(rows, 2 * i + 1))
        sums = add_products(sums, numbers[i], both)
    store_lanes(result, 0, first_lanes(sums))
    store_lanes(result, 1, second_lanes(sums))


@njit
def rounded_products_added(numbers, rows, result):
    sums = lanes_of(np.float32(0))
    for i in range(len(numbers)):
        sums = add_rounded_products(sums, numbers[i], load_lanes(rows, i))
    store_lanes(result, 0, sums)


@njit
def extremes(rows, result):
    smallest, largest = load_lanes(rows, 0), load_lanes(rows, 0)
    for i in range(1, len(rows)):
        smallest = smaller_lanes(smallest, load_lanes(rows, i))
        largest = larger_lanes(largest, load_lanes(rows, i))
    store_lanes(result, 0, smallest)
    store_lanes(result, 1, largest)


@njit
def fetched(rows, row, column):
    fetch_ahead(rows, row, column)
    return rows[0, 0]


def some_rows(count: int) -> np.ndarray:
    # They begin where no vector would.
    numbers = np.random.default_rng(0).standard_normal(count * LANES + 1, dtype=np.float32)
    return numbers[1:].reshape(count, LANES)


def test_products_are_added_lane_by_lane_and_only_the_wanted_row_is_written():
    rows, numbers = some_rows(5), np.float32([1, -2, 0.25, 3, 0])
    result = np.full((3, LANES), 7, dtype=np.float32)
    products_added(numbers, rows, result)
    assert np.allclose(result[1], 0.5 + numbers @ rows, rtol=1e-6)
    assert np.all(result[[0, 2]] == 7)


def test_sixteen_lanes_are_eight_and_eight_others():
    rows, numbers = some_rows(10), np.float32([1, -2, 0.25, 3, 0])
    result = np.zeros((2, LANES), dtype=np.float32)
    joined_products_added(numbers, rows, result)
    assert np.allclose(result[0], numbers @ rows[::2], rtol=1e-5, atol=1e-6)
    assert np.allclose(result[1], numbers @ rows[1::2], rtol=1e-5, atol=1e-6)


def test_rounded_products_are_those_of_single_numbers_to_the_last_bit():
    rows, numbers = some_rows(50), np.float32(np.random.default_rng(1).standard_normal(50))
    result = np.zeros((1, LANES), dtype=np.float32)
    rounded_products_added(numbers, rows, result)
    expected = np.zeros(LANES, dtype=np.float32)
    for number, row in zip(numbers, rows, strict=True):
        expected += number * row
    assert np.array_equal(result[0], expected)


def test_the_smaller_or_the_larger_number_of_each_lane_stays():
    rows = some_rows(6)
    result = np.zeros((2, LANES), dtype=np.float32)
    extremes(rows, result)
    assert np.array_equal(result[0], rows.min(axis=0))
    assert np.array_equal(result[1], rows.max(axis=0))


@settings(deadline=None)  # the first call compiles
@given(st.integers(0, 20), st.integers(1, 5))
def test_rows_lie_side_by_side_in_groups_of_eight(n, d):
    rows = np.arange(n * d, dtype=np.float32).reshape(n, d) + 1
    lanes = side_by_side(rows)
    assert lanes.shape == (-(-n // LANES), d, LANES)
    flat = lanes.transpose(0, 2, 1).reshape(-1, d)
    assert np.array_equal(flat[:n], rows)
    assert not flat[n:].any()


def test_what_lies_outside_an_array_can_be_asked_for():
    rows = some_rows(2)
    assert fetched(rows, 10**9, 10**6) == rows[0, 0]
