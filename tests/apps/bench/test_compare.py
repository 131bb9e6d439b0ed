"""Two runs are compared on the prompts that both have measured."""

from __future__ import annotations

import pytest
from bench_samples import entry, results, sample

from hf_refspec.apps.bench.results import write_results
from hf_refspec.apps.cli.main import main

PLAIN = sample("plain", 11, 11, 1.0, 10.0)


def rag(seconds: float, names: str, text: str = "x") -> dict:
    samples = [PLAIN, sample("ours", 11, 5, 1.0, seconds)]
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
    assert "| model | tiny | 8B |" in text and "torch" not in text
    assert "## rag, float32, 1 prompts" in text
    speed_ups = "1.83 → 2.20, +20.0% | 2.00 → 2.50, +25.0% [+25.0%, +25.0%]"
    assert f"| ours | 8 | 2.20 → 2.20, +0.0% | {speed_ups} | 6.0 → 5.0, -16.7% |" in text
    assert "**" not in text  # of one prompt any change may be chance


@pytest.mark.parametrize("prompts", ["abcdefghi", "abcdefghij"])
def test_a_change_of_most_prompts_is_bold_from_ten_prompts_on(compared, prompts):
    _, text = compared(rag(5.0, prompts), rag(4.0, prompts))
    [ours] = [line for line in text.splitlines() if line.startswith("| ours |")]
    bold = "**" if len(prompts) == 10 else ""
    assert f"| {bold}2.00 → 2.50, +25.0% [+25.0%, +25.0%]{bold} |" in ours
    assert "| 2.20 → 2.20, +0.0% |" in ours  # MAT has not changed


def test_a_change_of_some_prompts_up_and_some_down_is_not_bold(compared):
    other, slower = rag(4.0, "abcdefghijkl"), rag(6.0, "abcdefghijkl")
    slow = slower["suites"]["rag, float32"]["entries"][::2]
    other["suites"]["rag, float32"]["entries"][::2] = slow
    _, text = compared(rag(5.0, "abcdefghijkl"), other)
    assert "[-16.7%, +25.0%]" in text and "**" not in text


def test_a_method_that_some_prompts_lack_is_compared_on_the_others(compared):
    one = rag(5.0, "ab")
    one["suites"]["rag, float32"]["entries"][1]["samples"] = [PLAIN]
    assert "| ours | 8 | 2.20 → 2.20, +0.0% |" in compared(one, one)[1]


def test_answers_of_one_token_have_no_decoding(compared):
    short = results(rag=[entry("a", [sample("plain", 1, 1, 1.0, 0.0)])])
    _, text = compared(short, short)
    assert "| plain | 8 | 1.00 → 1.00, +0.0% | 1.00 → 1.00, +0.0% | - | 1.0 → 1.0, +0.0% |" in text


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
