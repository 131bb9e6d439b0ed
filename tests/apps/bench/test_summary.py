"""Samples are summarized, speed-ups prompt by prompt."""

from __future__ import annotations

import math

import pytest
from bench_samples import entry, sample

from hf_refspec.apps.bench.summary import Spread, summaries

DIFFERENCE = {"place": 19, "steps": 0.0}
ENTRIES = [
    entry(
        "a",
        [
            sample("plain", 11, 11, 1.0, 10.0),
            sample("ours", 11, 4, 1.0, 2.0, drafting_seconds=0.5, peak_bytes=9),
        ],
    ),
    entry(
        "b",
        [
            sample("plain", 21, 21, 1.0, 20.0),
            sample("ours", 21, 6, 1.0, 10.0, other_tokens=2, first_difference=DIFFERENCE),
        ],
    ),
    entry("c", [sample("plain", 1, 1, 2.0, 0.0), sample("ours", 1, 1, 1.0, 0.0)]),
]


def test_summarizes_each_method():
    plain, ours = summaries(ENTRIES).values()
    assert (plain.samples, plain.tokens, plain.mat, ours.mat) == (3, 33, 1.0, 3.0)
    assert (plain.equal, plain.margins) == (3, [])
    assert (ours.equal, ours.margins, ours.peak_bytes) == (2, [0.0], 9)
    assert ours.drafting_microseconds == pytest.approx(1e6 * 0.5 / 11)
    assert (plain.seconds, ours.seconds) == (34.0, 15.0)
    assert ours.speed_up == pytest.approx(34 / 15)  # as many tokens


def test_an_answer_of_one_token_has_no_decoding_speed():
    plain, ours = summaries(ENTRIES).values()
    assert plain.decoding_speed_up == Spread(1.0, 1.0, 1.0)
    assert ours.decoding_speed_up == Spread(3.5, 2.75, 4.25)  # of 2 and 5
    assert f"{ours.decoding_speed_up:.1f}" == "3.5 [2.8, 4.2]"
    [alone] = summaries([{"samples": ENTRIES[2]["samples"][:1]}]).values()
    assert math.isnan(alone.decoding_speed_up.median)
