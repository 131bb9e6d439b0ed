"""Corpora that are none are refused; long lines and many documents are built from."""

from __future__ import annotations

import pytest

from .sources import build_all


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    root = tmp_path_factory.mktemp("sources")
    return list(build_all(root, line_bytes=300_000, documents=3_000, seconds=8))


def test_each_source_is_built_from_or_refused(results):
    assert [f"{r.rows}: {r.outcome}" for r in results if r.outcome.is_bad] == []
    assert {result.outcome.name for result in results} == {"built", "refused"}
