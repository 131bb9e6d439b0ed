"""Reports have a table for each suite and retriever; two runs are compared on common prompts."""

from __future__ import annotations

import pytest
from bench_samples import entry, results, retrieval_sample, sample

from hf_refspec.bench.methods import BASELINE, OURS, PUBLISHED
from hf_refspec.bench.report import methods_table, report
from hf_refspec.bench.results import write_results
from hf_refspec.bench.summary import summaries
from hf_refspec.cli import main


def test_columns_that_are_empty_are_left_out():
    lines = methods_table(summaries([entry("a", [sample("plain", 4, 2, 1.0, 3.0)])])).splitlines()
    columns = "MAT | prefill, s | decoding, tokens/s | speed-up, decoding | speed-up, whole call"
    assert lines[0] == f"| method | nodes | {columns} | other ids |"
    assert lines[2].startswith("| plain | 8 | 2.00 | 1.000 [1.000, 1.000] | 1.0 [1.0, 1.0] | ")


def test_questions_with_categories_have_a_table_of_these():
    entries = [entry(f"{name}/1", [sample("plain", 4, 4, 1.0, 3.0)]) for name in ("a", "b")]
    text = report(results(rag=entries))
    assert "- cpu x\n- torch 2\n- model tiny\n" in text
    assert "## rag\n\n2 of 3 questions.\n" in text
    assert "| method | nodes | a | b |" in text
    assert "| plain | 8 | 1.00, 1.00x | 1.00, 1.00x |" in text


def test_each_retriever_has_a_table():
    right = {"strides": [1, 5], "verified": 5, "mismatched": 1, "searches": 3}
    samples = [retrieval_sample(BASELINE, 8.0, waiting_seconds=6.0, searches=9)]
    samples.append(retrieval_sample(OURS, 2.0, **right))
    entries = [entry(name, samples, setting="flat", size=1234) for name in "ab"]
    text = report(results(ralm=entries))
    assert "### flat, 1,234 to search" in text
    [baseline] = [line for line in text.splitlines() if line.startswith(f"| {BASELINE} | ")]
    [ours] = [line for line in text.splitlines() if line.startswith(f"| {OURS} | ")]
    assert "|  |  | 9 | 75% | 0 of 2 |" in baseline
    assert "| 4.00 [4.00, 4.00] | 0.833 | 3.00 | 3 | 0% | 0 of 2 |" in ours


# --- compare


def rag(seconds: float, names: str, text: str = "x") -> dict:
    samples = [sample("plain", 11, 11, 1.0, 10.0), sample("ours", 11, 5, 1.0, seconds)]
    return results(rag=[entry(name, samples, text) for name in names])


@pytest.fixture
def compared(tmp_path, capsys):
    """Compares two results from the command line; returns the exit status and what is printed."""

    def run(one: dict, other: dict) -> tuple[int, str]:
        for name, written in (("a", one), ("b", other)):
            (tmp_path / name).mkdir()
            write_results(written, tmp_path / name)
        paths = [str(tmp_path / "a"), str(tmp_path / "b" / "results.json")]
        status = main(["bench", "compare", *paths])
        return status, "".join(capsys.readouterr())

    return run


def test_compares_the_prompts_that_both_have_measured(compared):
    one, other = rag(5.0, "ab"), rag(4.0, "bc")
    other["settings"]["model"] = "8B"
    status, text = compared(one, other)
    assert status == 0
    assert "| model | tiny | 8B |" in text
    assert "torch" not in text
    assert "## rag, 1 prompts" in text
    speeds = "2.0 [2.0, 2.0] → 2.5 [2.5, 2.5], +25.0%"
    speed_ups = "2.00 [2.00, 2.00] → 2.50 [2.50, 2.50], +25.0%"
    assert f"| ours | 8 | 2.20 → 2.20, +0.0% | {speeds} | {speed_ups} | 1.83" in text


@pytest.mark.parametrize("other", [rag(4.0, "c"), rag(4.0, "ab", text="y"), results()])
def test_nothing_in_common_is_refused(compared, other):
    status, text = compared(rag(5.0, "ab"), other)
    assert status == 2 and "no prompt in common" in text


def test_two_results_are_needed(tmp_path, capsys):
    write_results(rag(5.0, "a"), tmp_path)
    assert main(["bench", "compare", str(tmp_path)]) == 2
    assert "takes two results, but got 1" in capsys.readouterr().err
    assert main(["bench", "compare", str(tmp_path), str(tmp_path / "c.json")]) == 2
    assert "c.json is missing: name a results.json, or its folder" in capsys.readouterr().err


def test_retrieval_is_compared_by_retriever_and_method(compared):
    def ralm(seconds: dict[str, float]) -> dict:
        samples = [retrieval_sample(method, taken) for method, taken in seconds.items()]
        both = [entry("a", samples, setting=name, size=9) for name in ("flat", "bm25")]
        return results(ralm=both)

    one, other = ralm({BASELINE: 8.0, OURS: 4.0, PUBLISHED: 5.0}), ralm({BASELINE: 8.0, OURS: 2.0})
    _, text = compared(one, other)
    flat, bm25 = text.partition("## ralm, bm25, 1 prompts")[::2]
    assert "## ralm, flat, 1 prompts" in flat
    for part in (flat, bm25):
        assert f"| {OURS} | " in part
        assert "| 2.00 [2.00, 2.00] → 4.00 [4.00, 4.00], +100.0% |" in part
    assert PUBLISHED not in text  # measured once only
