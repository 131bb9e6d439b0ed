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
    assert lines[0] == ("| method | nodes | MAT | seconds | speed-up | of decoding | texts equal |")
    assert lines[2] == "| plain | 8 | 2.00 | 4.0 | 1.00 | 1.00 [1.00, 1.00] | 1 of 1 |"


def test_the_automatic_budget_s_regret_is_beside_the_best_fixed_one():
    seconds = {"auto": 4.0, 8: 5.0, 64: 3.2}
    samples = [sample("ours", 10, 5, 0.0, time, nodes=nodes) for nodes, time in seconds.items()]
    table = methods_table(summaries([entry("a", samples)])).splitlines()
    assert [line.split(" | ")[-1] for line in table[:1] + table[2:]] == [
        *("regret |", "+25.0% |", " |", " |")
    ]


def test_questions_with_categories_have_a_table_of_these():
    entries = [entry(f"{name}/1", [sample("plain", 4, 4, 1.0, 3.0)]) for name in ("a", "b")]
    text = report(results(rag=entries))
    assert "- cpu x\n- torch 2\n- model tiny\n" in text
    assert "## rag, float32\n\n2 of 3 questions.\n" in text
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
    assert "|  |  | 9 | 75% | 2 of 2 |" in baseline
    assert "| 4.00 [4.00, 4.00] | 0.833 | 3.00 | 3 | 0% | 2 of 2 |" in ours


def test_several_suites_are_summed_up_for_each_type_of_numbers():
    def of_suites(dtype: str, seconds: float) -> dict:
        samples = [sample("plain", 11, 11, 1.0, 9.0), sample("ours", 11, 5, 1.0, seconds)]
        suites = {name: [entry(each, samples) for each in "ab"] for name in ("rag", "multi-turn")}
        return results(dtype, **suites)

    text = report(results())
    assert "All suites" not in text
    one, other = of_suites("float32", 4.0), of_suites("bfloat16", 1.0)
    text = report({**one, "suites": one["suites"] | other["suites"]})
    float32, bfloat16 = text.partition("## All suites, bfloat16\n")[::2]
    assert "## All suites, float32\n" in float32
    assert "| plain | 8 | 1.00 | 40.0 | 1.00 | 1.00 [1.00, 1.00] | 4 of 4 |" in float32
    assert "| ours | 8 | 2.20 | 20.0 | 2.00 | 2.25 [2.25, 2.25] | 4 of 4 |" in float32
    assert "| ours | 8 | 2.20, 5.00x | 2.20, 5.00x |" in bfloat16


def test_each_text_that_differs_is_listed_with_its_margin():
    def other(place: int, steps: float) -> dict:
        difference = {"place": place, "steps": steps}
        return sample("ours", 8, 4, 1.0, 3.0, other_tokens=5, first_difference=difference)

    plain = sample("plain", 8, 8, 1.0, 3.0)
    entries = [
        entry("a", [plain, other(3, 0.0), other(3, 0.0), other(6, 2.0)]),
        entry("b", [plain, plain]),
    ]
    text = report(results("bfloat16", rag=entries))
    assert "in steps of bfloat16 at that size" in text
    assert "| a | 3 | 0 | 2 |\n| a | 6 | 2 | 1 |" in text
    assert "| b |" not in text
    [ours] = [line for line in text.splitlines() if line.startswith("| ours | ")]
    assert ours.endswith("| 0 of 3 | 2 |")
    assert "margin" not in report(results(rag=entries[1:]))


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
    assert "## rag, float32, 1 prompts" in text
    totals = "6.0 → 5.0, -16.7% | 1.83 → 2.20, +20.0%"
    decoding = "2.00 [2.00, 2.00] → 2.50 [2.50, 2.50], +25.0%"
    assert f"| ours | 8 | 2.20 → 2.20, +0.0% | {totals} | {decoding} |" in text


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
    flat, bm25 = text.partition("## ralm, float32, bm25, 1 prompts")[::2]
    assert "## ralm, float32, flat, 1 prompts" in flat
    for part in (flat, bm25):
        assert f"| {OURS} | " in part
        assert "| 2.00 [2.00, 2.00] → 4.00 [4.00, 4.00], +100.0% |" in part
    assert PUBLISHED not in text  # measured once only
