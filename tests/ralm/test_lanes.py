from __future__ import annotations

import numpy as np
from numba import njit

from hf_refspec.ralm.lanes import (
    LANES,
    add_products,
    fetch_ahead,
    lanes_of,
    load_lanes,
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
def smallest(rows, result):
    lanes = lanes_of(np.float32(np.inf))
    for i in range(len(rows)):
        lanes = smaller_lanes(lanes, load_lanes(rows, i))
    store_lanes(result, 0, lanes)


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


def test_the_smaller_number_of_each_lane_stays():
    rows = some_rows(6)
    result = np.zeros((1, LANES), dtype=np.float32)
    smallest(rows, result)
    assert np.array_equal(result[0], rows.min(axis=0))


def test_what_lies_outside_an_array_can_be_asked_for():
    rows = some_rows(2)
    assert fetched(rows, 10**9, 10**6) == rows[0, 0]
