"""MAT has not dropped below benchmarks/guard.json."""

import json

import guard
import pytest
from guard import BASELINE, LEAST_MAT, Figures, data_cases, failures, measure, shipped_cases

from tests.helpers.shared_data import SOURCES, data_file


def check(cases: dict[str, guard.Case]) -> None:
    baseline = json.loads(BASELINE.read_text(encoding="utf-8"))
    mats = {name: guard.replay_case(case).mat for name, case in cases.items()}
    least = {name: LEAST_MAT * baseline[name]["mat"] for name in cases}
    assert not {name: mat for name, mat in mats.items() if mat < least[name]}


def test_mat_has_not_dropped(tmp_path):
    check(shipped_cases(tmp_path))


def test_mat_has_not_dropped_on_the_data_files():
    folders = {data_file(name).parent for name in SOURCES}
    check(data_cases(folders.pop()))


@pytest.mark.parametrize(
    ("figures", "worse"),
    [
        (Figures(1.981, 101, 1.49), None),
        (Figures(1.97, 102, 1.0), "a case: MAT was 2.0, is 1.97"),
        (Figures(2.5, 80, 1.51), "a case: drafting cost 1.0 calibration loops, costs 1.51"),
    ],
)
def test_what_counts_as_worse(figures, worse):
    baseline = {"a case": {"mat": 2.0, "forward_passes": 100, "relative_cost": 1.0}}
    assert failures({"a case": figures}, baseline) == ([worse] if worse else [])
    [unknown] = failures({"a case": figures}, {})
    assert unknown == "a case: not in the baseline; add it with --write"


@pytest.mark.parametrize(
    ("costs", "least"), [([9.0, 8.0, 1.2, 1.0], 1.2), ([9.0, 8.0, 7.0, 6.0, 5.0], 5.0)]
)
def test_a_cost_that_is_too_high_is_measured_again_and_the_least_counts(
    monkeypatch, tmp_path, costs, least
):
    case = shipped_cases(tmp_path)["no-overlap, ReferenceCopy, 16"]
    left = iter(costs)
    monkeypatch.setattr(guard, "_relative_cost", lambda case: next(left))
    assert measure(case, {"relative_cost": 1.0}).relative_cost == least
