"""The int8 copy of vectors: its scores are true within the bound that it states."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_refspec.retrieval import int8_copy
from hf_refspec.retrieval.int8_copy import Int8Copy
from tests.helpers.hard_vectors import HARD, hard_vectors


def true_scores(vectors: np.ndarray, query: np.ndarray, by_distance: bool) -> np.ndarray:
    vectors, query = vectors.astype(np.float64), query.astype(np.float64)
    return -((vectors - query) ** 2).sum(axis=1) if by_distance else vectors @ query


@given(
    st.sampled_from(HARD),
    st.booleans(),
    st.integers(1, 300),
    st.integers(1, 900),
    st.integers(1, 40),
    st.integers(0, 1000),
)
def test_scores_are_true_within_their_error(kind, by_distance, n, d, k, seed):
    vectors, queries = hard_vectors(kind, n, d, seed)
    begin = seed % n
    copy = Int8Copy(vectors, by_distance)
    for query, found in zip(queries, copy.scan(queries, k, begin, n), strict=True):
        true = true_scores(vectors[begin:], query, by_distance)
        assert np.abs(found.scores.astype(np.float64) + found.offset - true).max() <= found.error
        for score in (true.max(), np.median(true), true.min()):
            assert np.isin(np.flatnonzero(true >= score), found.at_least(score)).all()
        expected = np.sort(found.scores)[::-1][:k]
        assert np.array_equal(np.sort(found.scores[found.best])[::-1], expected)
        assert len(np.unique(found.best)) == len(found.best)


@pytest.mark.parametrize("by_distance", [False, True])
def test_the_error_of_usual_vectors_leaves_few_to_be_read_in_full(by_distance):
    vectors, queries = hard_vectors("usual", 3000, 256, 0)
    scanned = Int8Copy(vectors, by_distance).scan(queries, 8, 0, 3000)
    for query, found in zip(queries, scanned, strict=True):
        eighth = np.sort(true_scores(vectors, query, by_distance))[-8]
        assert 8 <= len(found.at_least(eighth)) < 60


@pytest.mark.parametrize("by_distance", [False, True])
def test_kernels_do_what_python_does(by_distance, monkeypatch):
    vectors, queries = hard_vectors("usual", 70, 33, 1)
    compiled = Int8Copy(vectors, by_distance)
    found = compiled.scan(queries, 6, 3, 70)
    for name in ("round_rows", "scan_rows"):
        kernel = getattr(int8_copy, name)
        monkeypatch.setattr(int8_copy, name, kernel.python)
        monkeypatch.setattr(kernel.python, "compile", lambda: None, raising=False)
    for name in ("_round_row", "_product", "_keep_best"):
        monkeypatch.setattr(int8_copy, name, getattr(int8_copy, name).py_func)
    interpreted = Int8Copy(vectors, by_distance)
    assert np.array_equal(compiled._rows, interpreted._rows)
    for one, other in zip(found, interpreted.scan(queries, 6, 3, 70), strict=True):
        assert sorted(one.best) == sorted(other.best)
        np.testing.assert_allclose(one.scores, other.scores, rtol=1e-6, atol=1e-6)
