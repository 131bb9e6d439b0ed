"""Search among vectors: exact, by FAISS, and with the same scores whatever the batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_refspec.retrieval.faiss_flat import FaissFlatIndex
from hf_refspec.retrieval.flat import FlatIndex, scan
from hf_refspec.retrieval.hnsw import HnswIndex
from hf_refspec.retrieval.retrieved import Retrieved
from hf_refspec.retrieval.vector_index import squared_lengths

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


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 600), st.integers(1, 40), st.integers(1, 35), st.integers(1, 20))
def test_a_scan_finds_the_highest_scores_of_each_query_and_a_bound_on_the_others(n, d, q, most):
    generator = np.random.default_rng(n + d + q)
    rows = generator.standard_normal((n, d), dtype=np.float32)
    queries = generator.standard_normal((q, d), dtype=np.float32)
    offsets = generator.standard_normal(n, dtype=np.float32)
    most = min(most, n)
    ids = np.empty((q, 2 * most), dtype=np.int64)
    scores = np.empty(ids.shape, dtype=np.float32)
    counts, bounds = np.zeros(q, dtype=np.int64), np.full(q, -np.inf, dtype=np.float32)
    scan(rows, offsets, queries, ids, scores, counts, bounds)
    expected = offsets + queries.astype(np.float64) @ rows.T
    for s in range(q):
        found = ids[s, : counts[s]]
        assert len(set(found)) == counts[s] >= most
        assert np.allclose(scores[s, : counts[s]], expected[s, found], atol=1e-4)
        others = np.delete(expected[s], found)
        assert np.all(others <= bounds[s] + 1e-4)
        best, kept = np.sort(expected[s])[::-1][:most], np.sort(expected[s, found])[::-1][:most]
        assert np.allclose(kept, best)


@settings(max_examples=60, deadline=None)
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
    for query, found in zip(queries, index.search(queries, k), strict=True):
        assert_same(found, ranked(index, query, k))


@pytest.mark.parametrize("metric", METRICS)
def test_scores_are_minus_squared_distances_or_inner_products(metric):
    rows = np.random.default_rng(0).standard_normal((50, 24), dtype=np.float32)
    query, ids = rows[3] + 1, np.array([7, 0, 49])
    expected = rows[ids] @ query if metric != "l2" else -((rows[ids] - query) ** 2).sum(axis=1)
    scores = flat(rows, metric).score(query, ids)
    assert scores.dtype == np.float32
    assert np.allclose(scores, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("metric", METRICS)
def test_rows_far_from_the_origin_are_told_apart(metric):
    generator = np.random.default_rng(0)
    rows = generator.standard_normal((3000, 16), dtype=np.float32) * 0.01 + 100
    index = flat(rows, metric)
    (found,) = index.search(rows[:1], 10)
    assert_same(found, ranked(index, rows[0], 10))


def test_threads_find_the_same(monkeypatch):
    rows = np.random.default_rng(0).standard_normal((1001, 24), dtype=np.float32)
    index = flat(rows)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    alone = index.search(rows[:5], 30)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    for one, other in zip(alone, index.search(rows[:5], 30), strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("metric", METRICS)
def test_a_graph_finds_nearly_all(metric):
    pytest.importorskip("faiss")
    rows = np.random.default_rng(0).standard_normal((3000, 16), dtype=np.float32)
    walked = HnswIndex(rows, squared_lengths(rows), metric)
    pairs = zip(flat(rows, metric).search(rows[:50], 10), walked.search(rows[:50], 10), strict=True)
    assert np.mean([np.isin(a.ids, b.ids).mean() for a, b in pairs]) > 0.95


@pytest.mark.parametrize("metric", METRICS)
def test_the_flat_index_of_faiss_finds_the_same(metric):
    """Its sums round in another order, and it has a limit of candidates."""
    pytest.importorskip("faiss")
    rows = np.random.default_rng(0).standard_normal((1000, 24), dtype=np.float32)
    rows[::3] = rows[0]
    index = FaissFlatIndex(rows, squared_lengths(rows), metric)
    for k in (1, 5, 100, 2000):
        for query, found in zip(rows[:9], index.search(rows[:9], k), strict=True):
            assert_same(found, ranked(index, query, k))
