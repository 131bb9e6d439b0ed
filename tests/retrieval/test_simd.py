from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from hf_refspec.retrieval.simd import add_scaled_row, fetch_ahead, scores_of_tile, side_by_side


@njit
def scaled_rows_added(sums, numbers, rows):
    for i in range(len(numbers)):
        add_scaled_row(sums, 1, numbers[i], rows, i)


@njit
def fetched(rows, row, column):
    fetch_ahead(rows, row, column)
    return rows[0, 0]


def some_rows(count: int, width: int = 8) -> np.ndarray:
    # They begin where no vector would.
    numbers = np.random.default_rng(0).standard_normal(count * width + 1, dtype=np.float32)
    return numbers[1:].reshape(count, width)


def test_scaled_rows_are_added_as_single_numbers_are_to_the_last_bit():
    rows, numbers = some_rows(50), np.float32(np.random.default_rng(1).standard_normal(50))
    sums = np.full((3, 8), 0.5, dtype=np.float32)
    scaled_rows_added(sums, numbers, rows)
    expected = np.full(8, 0.5, dtype=np.float32)
    for number, row in zip(numbers, rows, strict=True):
        expected += number * row
    assert np.array_equal(sums[1], expected)
    assert np.all(sums[[0, 2]] == 0.5)  # only the wanted row is written


@pytest.mark.parametrize(("tile", "width"), [(8, 8), (8, 16), (2, 4)])
def test_a_tile_of_rows_is_scored_for_queries_side_by_side(tile, width):
    scores_of = scores_of_tile(tile, width)

    @njit
    def score(rows, offsets, first, queries, scores, target, highest):
        scores_of(rows, offsets, first, queries, scores, target, highest)

    rows, offsets, queries = some_rows(20, 37), some_rows(1, 20), some_rows(37, width)
    scores = np.full((tile + 3, width), 7, dtype=np.float32)
    highest = np.full((1, width), -np.inf, dtype=np.float32)
    highest[0, 0] = 1e6
    score(rows, offsets, 5, queries, scores, 2, highest)
    expected = offsets[0, 5 : 5 + tile, None] + rows[5 : 5 + tile] @ queries
    assert np.allclose(scores[2 : tile + 2], expected, rtol=1e-5, atol=1e-5)
    assert np.all(scores[:2] == 7) and np.all(scores[-1] == 7)
    assert np.array_equal(highest[0, 1:], scores[2 : tile + 2, 1:].max(axis=0))
    assert highest[0, 0] == 1e6


@settings(deadline=None)  # the first call compiles
@given(st.integers(0, 20), st.integers(1, 5), st.sampled_from([8, 16]))
def test_rows_lie_side_by_side_in_groups(n, d, width):
    rows = np.arange(n * d, dtype=np.float32).reshape(n, d) + 1
    grouped = side_by_side(rows, width)
    assert grouped.shape == (-(-n // width), d, width)
    flat = grouped.transpose(0, 2, 1).reshape(-1, d)
    assert np.array_equal(flat[:n], rows)
    assert not flat[n:].any()


def test_what_lies_outside_an_array_can_be_fetched_ahead():
    rows = some_rows(2)
    assert fetched(rows, 10**9, 10**6) == rows[0, 0]
