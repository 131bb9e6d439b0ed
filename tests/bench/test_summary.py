"""Samples are summed up, speed-ups prompt by prompt."""

from __future__ import annotations

import math

import pytest
from bench_samples import retrieval_sample, sample

from hf_refspec.bench.summary import Spread, summaries

ENTRIES = [
    {
        "samples": [
            sample("plain", 11, 11, 1.0, 10.0),
            sample("ours", 11, 4, 1.0, 2.0, accepted_lengths=[1, 2], drafting_seconds=0.5),
        ]
    },
    {
        "samples": [
            sample("plain", 21, 21, 1.0, 20.0),
            sample("ours", 21, 6, 1.0, 10.0, accepted_lengths=[0, 0, 3], other_tokens=2),
        ]
    },
    {"samples": [sample("plain", 1, 1, 2.0, 0.0), sample("ours", 1, 1, 1.0, 0.0)]},
]


def test_sums_up_each_way():
    plain, ours = summaries(ENTRIES).values()
    assert (plain.samples, plain.tokens, plain.mat) == (3, 33, 1.0)
    assert (ours.forward_passes, ours.mat) == (11, 3.0)
    assert ours.accepted_lengths == [1, 2, 3]
    assert ours.different == 1
    assert ours.drafting_microseconds == pytest.approx(1e6 * 0.5 / 11)
    assert ours.prefill_seconds.median == 1.0


def test_an_answer_of_one_token_has_no_speed_of_decoding():
    plain, ours = summaries(ENTRIES).values()
    assert plain.decoding_speed_up == Spread(1.0, 1.0, 1.0)
    assert ours.decoding_speed_up == Spread(3.5, 2.75, 4.25)  # of 2 and 5
    assert ours.tokens_per_second == Spread(3.5, 2.75, 4.25)
    assert ours.speed_up.median == pytest.approx(2.0)  # of 11/3, 21/11 and 2
    [alone] = summaries([{"samples": ENTRIES[2]["samples"][:1]}]).values()
    assert math.isnan(alone.decoding_speed_up.median)


def test_a_spread_is_printed_with_its_quartiles():
    assert f"{Spread.of([1.0, 2.0, 3.0]):.1f}" == "2.0 [1.5, 2.5]"


def test_what_retrieval_took_is_of_the_samples_that_retrieved():
    stats = {"strides": [1, 5], "verified": 5, "mismatched": 1, "searches": 3}
    stats |= {"waiting_seconds": 3.0, "model_seconds": 0.5, "query_seconds": 0.5}
    runs = [retrieval_sample("ours", run, 4.0, **stats) for run in (0, 1)]
    [ours] = summaries([{"samples": [*runs, *runs]}]).values()
    assert ours.retrieval.gamma == pytest.approx(5 / 6) and ours.retrieval.mean_stride == 3.0
    assert ours.retrieval.searches == 3 and ours.retrieval.waiting == 0.75
    assert ours.retrieval.queries == ours.retrieval.model == 0.125


def test_each_run_is_compared_with_the_first_method_of_that_run():
    times = {0: (8.0, 2.0), 1: (9.0, 3.0)}
    runs = [
        retrieval_sample(method, run, seconds)
        for run, pair in times.items()
        for method, seconds in zip(("baseline", "ours"), pair, strict=True)
    ]
    _, ours = summaries([{"samples": runs}]).values()
    assert ours.speed_up == Spread(3.5, 3.25, 3.75)
