"""Search among vectors: exact, by FAISS, and with the same scores whatever the batch."""

from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_refspec.retrieval.retriever import Retrieved
from hf_refspec.retrieval.vector_index import (
    FaissFlatIndex,
    FlatIndex,
    HnswIndex,
    squared_lengths,
)
from tests.helpers.hard_vectors import HARD, hard_vectors

METRICS = ["l2", "inner_product"]


def flat(rows: np.ndarray, metric: str = "l2") -> FlatIndex:
    return FlatIndex(rows, squared_lengths(rows), metric)


def ranked(index, query, k):
    """All vectors by the index's own scores, ties by id."""
    ids = np.arange(len(index.vectors))
    return Retrieved.best(ids, index.score(query, ids), k)


def assert_same(found, expected):
    assert np.array_equal(found.ids, expected.ids)
    assert np.array_equal(found.scores, expected.scores)


@given(st.sampled_from(METRICS), st.integers(1, 80), st.integers(1, 9), st.integers(0, 2**32 - 1))
def test_a_score_is_that_of_numpy_and_the_same_beside_any_other_query_and_vector(
    metric, d, count, seed
):
    generator = np.random.default_rng(seed)
    rows = generator.standard_normal((50, d), dtype=np.float32)
    queries = generator.standard_normal((count, d), dtype=np.float32)
    index, ids = flat(rows, metric), generator.permutation(50)[:20]
    assert index.score(queries[0], ids[:0]).shape == (0,)
    for query in queries:
        scores = index.score(query, ids)
        products, distances = rows[ids] @ query, ((rows[ids] - query) ** 2).sum(axis=1)
        expected = -distances if metric == "l2" else products
        assert scores.dtype == np.float32
        assert np.allclose(scores, expected, rtol=1e-5, atol=1e-4)
        assert np.array_equal(scores[3:9], index.score(query, ids[3:9]))
    (found,) = index.search(queries[:1], 50)
    for beside in (queries, queries[::-1]):
        assert_same(found, index.search(beside, 50)[0 if beside is queries else -1])


@given(
    st.sampled_from(METRICS),
    st.integers(1, 700),
    st.integers(1, 40),
    st.integers(1, 35),
    st.integers(1, 60),
    st.integers(1, 8),
    st.integers(0, 1000),
)
def test_it_finds_what_sorting_by_score_and_id_gives(metric, n, d, count, k, kinds, seed):
    generator = np.random.default_rng(seed)
    # Few different rows: most scores are tied.
    rows = generator.standard_normal((kinds, d), dtype=np.float32)
    rows = rows[generator.integers(0, kinds, n)]
    queries = generator.standard_normal((count, d), dtype=np.float32)
    index = flat(rows, metric)
    with patch.object(torch, "get_num_threads", lambda: 1 + seed % 3):
        searched = index.search(queries, k)
    for query, found in zip(queries, searched, strict=True):
        assert_same(found, ranked(index, query, k))


@given(
    st.sampled_from(METRICS),
    st.sampled_from(HARD),
    st.integers(1, 3000),
    st.integers(1, 100),
    st.sampled_from([1, 20, 300]),
    st.integers(0, 1000),
)
def test_it_tells_vectors_apart_that_are_hard_to_round(metric, kind, n, d, k, seed):
    vectors, queries = hard_vectors(kind, n, d, seed)
    index = flat(vectors, metric)
    for query, found in zip(queries, index.search(queries, k), strict=True):
        assert_same(found, ranked(index, query, k))


@pytest.mark.parametrize("metric", METRICS)
def test_scores_too_small_for_float32_lose_no_vector_where_denormal_numbers_count_as_0(metric):
    torch.set_flush_denormal(True)
    try:
        for seed in range(20):
            vectors, queries = hard_vectors("tiny", 7, 3, seed)
            index = flat(vectors * np.float32(1e3), metric)
            for query, found in zip(queries, index.search(queries, 2), strict=True):
                assert_same(found, ranked(index, query, 2))
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("metric", METRICS)
def test_a_graph_finds_nearly_all_and_the_flat_index_of_faiss_the_same(metric):
    """FAISS sums in another order, and finds a limited number of candidates."""
    pytest.importorskip("faiss")
    rows = np.random.default_rng(0).standard_normal((3000, 16), dtype=np.float32)
    walked = HnswIndex(rows, squared_lengths(rows), metric)
    pairs = zip(flat(rows, metric).search(rows[:50], 10), walked.search(rows[:50], 10), strict=True)
    assert np.mean([np.isin(a.ids, b.ids).mean() for a, b in pairs]) > 0.95
    rows[::3] = rows[0]
    index = FaissFlatIndex(rows, squared_lengths(rows), metric)
    for k in (1, 5, 100, 2500):
        for query, found in zip(rows[:9], index.search(rows[:9], k), strict=True):
            assert_same(found, ranked(index, query, k))
