from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_refspec.index.nearest_rows import LinkedRows, ScannedRows, scan
from hf_refspec.index.retrieved import Retrieved


def scanned(rows: np.ndarray) -> ScannedRows:
    return ScannedRows(rows, (rows.astype(np.float64) ** 2).sum(1).astype(np.float32))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 600), st.integers(1, 40), st.integers(1, 35), st.integers(1, 20))
def test_a_scan_gives_the_smallest_distances_of_each_query_and_a_bound_on_the_others(n, d, q, most):
    generator = np.random.default_rng(n + d + q)
    rows = generator.standard_normal((n, d), dtype=np.float32)
    queries = generator.standard_normal((q, d), dtype=np.float32)
    norms = (rows**2).sum(axis=1)
    most = min(most, n)
    ids = np.empty((q, 2 * most), dtype=np.int64)
    distances = np.empty(ids.shape, dtype=np.float32)
    counts, largest = np.zeros(q, dtype=np.int64), np.full(q, np.inf, dtype=np.float32)
    scan(rows, norms, queries, ids, distances, counts, largest)
    expected = norms - 2 * queries.astype(np.float64) @ rows.T
    for s in range(q):
        found = ids[s, : counts[s]]
        assert len(set(found)) == counts[s] >= most
        assert np.allclose(distances[s, : counts[s]], expected[s, found], atol=1e-4)
        others = np.delete(expected[s], found)
        assert np.all(others >= largest[s] - 1e-4)
        assert np.allclose(np.sort(expected[s])[:most], np.sort(expected[s, found])[:most])


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 700),
    st.integers(1, 40),
    st.integers(1, 35),
    st.integers(1, 60),
    st.integers(1, 8),
    st.integers(0, 1000),
)
def test_it_finds_what_sorting_by_score_and_id_gives(n, d, count, k, kinds, seed):
    generator = np.random.default_rng(seed)
    # Few different rows: most scores are tied.
    rows = generator.standard_normal((kinds, d), dtype=np.float32)
    rows = rows[generator.integers(0, kinds, n)]
    queries = generator.standard_normal((count, d), dtype=np.float32)
    index = scanned(rows)
    for query, found in zip(queries, index.search(queries, min(k, n)), strict=True):
        ids = np.arange(n)
        scores = index.score(query, ids)
        expected = Retrieved.best(ids, scores, k)
        assert np.array_equal(found.ids, expected.ids)
        assert np.array_equal(found.scores, expected.scores)


def test_rows_far_from_the_origin_are_told_apart():
    generator = np.random.default_rng(0)
    rows = generator.standard_normal((3000, 16), dtype=np.float32) * 0.01 + 100
    index = scanned(rows)
    (found,) = index.search(rows[:1], 10)
    expected = Retrieved.best(np.arange(3000), index.score(rows[0], np.arange(3000)), 10)
    assert np.array_equal(found.ids, expected.ids)


def test_threads_find_the_same(monkeypatch):
    rows = np.random.default_rng(0).standard_normal((1001, 24), dtype=np.float32)
    index = scanned(rows)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    alone = index.search(rows[:5], 30)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    for one, other in zip(alone, index.search(rows[:5], 30), strict=True):
        assert np.array_equal(one.ids, other.ids)
        assert np.array_equal(one.scores, other.scores)


def test_a_graph_finds_nearly_all():
    rows = np.random.default_rng(0).standard_normal((3000, 16), dtype=np.float32)
    exact, walked = scanned(rows).search(rows[:50], 10), LinkedRows(rows).search(rows[:50], 10)
    hits = [np.isin(a.ids, b.ids).mean() for a, b in zip(exact, walked, strict=True)]
    assert np.mean(hits) > 0.95
