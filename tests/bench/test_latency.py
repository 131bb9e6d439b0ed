"""Drafting alone is timed, from each kind of drafter."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer

from hf_refspec.bench.latency import (
    COMPACT,
    CONTEXT,
    DRAFTS,
    Point,
    latency_points,
    measure_latency,
)
from hf_refspec.demo.run import BUNDLED_MODEL


@pytest.fixture(scope="module")
def bundled():
    return AutoTokenizer.from_pretrained(BUNDLED_MODEL)


@pytest.mark.parametrize("kind", dict.fromkeys(point.drafter for point in latency_points()))
def test_each_kind_of_drafter_is_timed(bundled, kind):
    entry = measure_latency(Point(kind, 3000), bundled)
    assert (entry["drafter"], entry["tokens"]) == (kind, 3000)
    assert len(entry["seconds"]) == DRAFTS
    assert min(entry["seconds"]) > 0


def test_points_have_names_of_their_own():
    names = [point.id for point in latency_points()]
    assert len(set(names)) == len(names)
    assert f"{CONTEXT}, 1024 tokens" in names
    assert f"{COMPACT}, 131072 tokens" in names
