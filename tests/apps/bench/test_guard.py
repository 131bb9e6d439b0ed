"""MAT has not dropped and drafting has not become dearer than benchmarks/guard.json says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from shared_data import SOURCES, data_file

from hf_refspec.apps.bench import guard
from hf_refspec.apps.bench.guard import Case, Figures, data_cases, failures, measure, shipped_cases

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
BASELINE = json.loads((BENCHMARKS / "guard.json").read_text(encoding="utf-8"))


def check(cases: dict[str, Case]) -> None:
    measured = {name: measure(case, BASELINE.get(name)) for name, case in cases.items()}
    worse = failures(measured, BASELINE)
    assert not worse, "\n".join(worse)


def test_nothing_has_become_worse(tmp_path):
    check(shipped_cases(BENCHMARKS / "guard.jsonl", tmp_path))


def test_nothing_has_become_worse_on_the_data_files():
    folders = {data_file(name).parent for name in SOURCES}
    check(data_cases(folders.pop()))


@pytest.mark.parametrize(
    ("figures", "worse"),
    [
        (Figures(2.0, 100, 1.0), None),
        (Figures(1.981, 101, 1.49), None),
        (Figures(1.97, 101, 1.0), "a case: MAT was 2.0, is 1.97"),
        (Figures(2.0, 102, 1.0), "a case: forward passes were 100, are 102"),
        (Figures(2.5, 80, 1.51), "a case: drafting cost 1.0 calibration loops, costs 1.51"),
    ],
)
def test_what_counts_as_worse(figures, worse):
    baseline = {"a case": {"mat": 2.0, "forward_passes": 100, "relative_cost": 1.0}}
    assert failures({"a case": figures}, baseline) == ([worse] if worse else [])


@pytest.mark.parametrize(
    ("costs", "least"), [([9.0, 8.0, 1.2, 1.0], 1.2), ([9.0, 8.0, 7.0, 6.0, 5.0], 5.0)]
)
def test_a_cost_that_is_too_high_is_measured_again_and_the_least_counts(
    monkeypatch, tmp_path, costs, least
):
    case = shipped_cases(BENCHMARKS / "guard.jsonl", tmp_path)["no-overlap, ReferenceCopy, 16"]
    left = iter(costs)
    monkeypatch.setattr(guard, "_relative_cost", lambda case: next(left))
    assert measure(case, {"relative_cost": 1.0}).relative_cost == least


def test_a_case_without_figures_is_told():
    [line] = failures({"new": Figures(2.0, 100, 1.0)}, {})
    assert line == "new: not in the baseline; add it with --write"


def test_outside_of_a_checkout_it_says_so(tmp_path, capsys):
    with pytest.raises(SystemExit):
        guard.main(["--benchmarks", str(tmp_path)])
    assert "has no guard.jsonl; run this in a checkout" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        guard.main(["--benchmarks", str(BENCHMARKS), "--data", str(tmp_path / "none")])
    assert "none is no folder" in capsys.readouterr().err
