"""Tables of speculated retrieval: speed-ups over the runs, gamma, OS3 against fixed strides."""

from __future__ import annotations

import pytest

from hf_refspec.bench.retrieval_report import retrieval_tables, summarised
from hf_refspec.bench.retrieval_ways import (
    BASELINE,
    OURS,
    ablations,
    fixed_strides,
    main_ways,
)
from hf_refspec.ralm.stats import RetrievalStats


def sample(way: str, run: int, seconds: float, **stats) -> dict:
    figures = {**RetrievalStats().to_dict(), **stats}
    base = {"way": way, "run": run, "seconds": seconds, "tokens": 8, "other_tokens": 0}
    return {**base, "stats": figures}


def entry(name: str, runs: list[dict], ablated: bool = False) -> dict:
    about = {"name": name, "retriever": "flat", "passages": 1234, "ablated": ablated}
    return {**about, "runs": runs}


def two_questions() -> list[dict]:
    waiting = {"waiting_seconds": 6.0, "model_seconds": 1.0, "query_seconds": 1.0}
    right = {"strides": [1, 5], "verified": 5, "mismatched": 1, "searches": 3}
    return [
        entry(
            name,
            [
                sample(way, run, seconds, **stats)
                for run, ours in ((0, 2.0), (1, 4.0))
                for way, seconds, stats in ((BASELINE, 8.0, waiting), (OURS, ours, right))
            ],
        )
        for name in "ab"
    ]


def test_sums_questions_and_compares_runs():
    ours = summarised(two_questions(), OURS)
    assert ours.seconds == [4.0, 8.0]
    assert ours.speed_ups == [4.0, 2.0] and ours.speed_up == 3.0
    assert ours.gamma == pytest.approx(5 / 6) and ours.mean_stride == 3.0
    assert ours.tokens == 16 and ours.searches == 6
    baseline = summarised(two_questions(), BASELINE)
    assert baseline.waiting == 0.75 and baseline.queries == baseline.model == 0.125


def test_tables_have_means_and_deviations():
    text = retrieval_tables(two_questions())
    assert "### flat, 1,234 to search" in text
    assert "model and queries) 3.0 : 1; 12% of its time went into making queries" in text
    assert f"| {OURS} | 6.00 ± 2.83 | 2.7 | 3.00 ± 1.41 | 0.833 | 3.00 | 6 | 0% | 0 of 4 |" in text
    assert "OS3" not in text  # nothing was ablated


def test_os3_is_held_against_the_best_stride_on_the_same_questions():
    fast = {OURS: 2.0, "stride 3, asynchronous": 1.6, "ours, ps": 1.0, "stride 8": 4.0}
    names = [way.name for way in [*main_ways(), *ablations(), *fixed_strides()]]
    runs = [
        sample(name, run, fast.get(name, 8.0), model_seconds=1) for name in names for run in (0, 1)
    ]
    text = retrieval_tables([*two_questions(), entry("c", runs, ablated=True)]).splitlines()
    [asynchronous] = [line for line in text if line.startswith("| asynchronous")]
    [synchronous] = [line for line in text if line.startswith("| synchronous")]
    assert asynchronous.endswith("| 4.00 | -20.0% |") and "| 5.00 |" in asynchronous
    assert synchronous.endswith("| 2.00 | 8.00 | +300.0% |")
    assert sum(line.startswith("| as published") for line in text) == 1 + 8


def test_a_ratio_below_one_is_turned_round():
    waiting = {"waiting_seconds": 1.0, "model_seconds": 2.0}
    runs = [sample(way.name, 0, 3.0, **waiting) for way in main_ways()]
    assert "model and queries) 1 : 2.0;" in retrieval_tables([entry("a", runs)])
