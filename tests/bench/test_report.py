"""Tables of what was measured, of retrieval with OS3 against fixed strides."""

from __future__ import annotations

from bench_samples import retrieval_entry, retrieval_sample, sample

from hf_refspec.bench.methods import BASELINE, OURS, ablations, main_speculations, strides
from hf_refspec.bench.report import methods_table, suite_tables
from hf_refspec.bench.summary import summaries


def two_questions() -> list[dict]:
    waiting = {"waiting_seconds": 6.0, "model_seconds": 1.0, "query_seconds": 1.0}
    right = {"strides": [1, 5], "verified": 5, "mismatched": 1, "searches": 3}
    return [
        retrieval_entry(
            name,
            [
                retrieval_sample(method, run, seconds, **stats)
                for run, ours in ((0, 2.0), (1, 4.0))
                for method, seconds, stats in ((BASELINE, 8.0, waiting), (OURS, ours, right))
            ],
        )
        for name in "ab"
    ]


def test_columns_that_are_empty_are_left_out():
    lines = methods_table(summaries([{"samples": [sample("plain", 4, 2, 1.0, 3.0)]}])).splitlines()
    columns = "MAT | prefill, s | decoding, tokens/s | speed-up in decoding | speed-up in all"
    assert lines[0] == f"| method | nodes | {columns} | other ids |"
    assert lines[2].startswith("| plain | 8 | 2.00 | 1.000 [1.000, 1.000] | 1.0 [1.0, 1.0] | ")


def test_questions_with_categories_have_a_table_of_these():
    entries = [
        {"name": f"{name}/1", "samples": [sample("plain", 4, 4, 1.0, 3.0)]} for name in ("a", "b")
    ]
    text = suite_tables(entries)
    assert "| method | nodes | a | b |" in text
    assert "| plain | 8 | 1.00, 1.00x | 1.00, 1.00x |" in text


def test_each_retriever_has_a_table_with_the_baseline_s_ratio():
    text = suite_tables(two_questions())
    assert "### flat, 1,234 to search" in text
    assert "model and queries) 3.0 : 1; 12% of its time went into making queries" in text
    [ours] = [line for line in text.splitlines() if line.startswith(f"| {OURS} | ")]
    assert "| 3.00 [2.00, 4.00] | 0.833 | 3.00 | 3 | 0% | 0 of 4 |" in ours
    assert "OS3" not in text  # nothing was ablated


def test_os3_is_held_against_the_best_stride_on_the_same_questions():
    fast = {OURS: 2.0, "stride 3, asynchronous": 1.6, "ours, ps": 1.0, "stride 8": 4.0}
    runs = [
        retrieval_sample(name, run, fast.get(name, 8.0), model_seconds=1)
        for run in (0, 1)
        for name in {**main_speculations(), **ablations(), **strides()}
    ]
    entries = [*two_questions(), retrieval_entry("c", runs, ablated=True)]
    text = suite_tables(entries).splitlines()
    [asynchronous] = [line for line in text if line.startswith("| asynchronous")]
    [synchronous] = [line for line in text if line.startswith("| synchronous")]
    assert asynchronous.endswith("| 4.00 | -20.0% |") and "| 5.00 |" in asynchronous
    assert synchronous.endswith("| 2.00 | 8.00 | +300.0% |")
    assert sum(line.startswith("| as published") for line in text) == 1 + 8


def test_a_ratio_below_one_is_turned_round():
    waiting = {"waiting_seconds": 1.0, "model_seconds": 2.0}
    runs = [retrieval_sample(name, 0, 3.0, **waiting) for name in main_speculations()]
    assert "model and queries) 1 : 2.0;" in suite_tables([retrieval_entry("a", runs)])
