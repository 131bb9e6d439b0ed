"""The scripts that run `hf-refspec bench` on text that the model writes, with more beside it."""

from __future__ import annotations

import json
from pathlib import Path

import budget_decisions
import pytest
import recycling_settings

from hf_refspec.apps.bench.methods import DEFAULT
from hf_refspec.apps.bench.results import read_results


@pytest.fixture
def model(tmp_path, data, tokenizer, byte_llama, monkeypatch) -> list[str]:
    """The arguments of a run with one question."""
    byte_llama.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    given = ["--model", "model", "--max-new-tokens", "10", "--device", "cpu", "--limit", "1"]
    return [*given, "--data", "data", "--out", "out"]


def samples() -> list[dict]:
    [entry] = read_results(Path("out"))["suites"]["spec-bench, float32"]["entries"]
    return entry["samples"]


def test_each_decision_of_an_automatic_budget_is_logged(model):
    chosen = ["spec-bench", *model, "--methods", DEFAULT, "--nodes", "auto"]
    assert budget_decisions.main(["decisions.jsonl", *chosen]) == 0
    decisions = [json.loads(line) for line in Path("decisions.jsonl").read_text().splitlines()]
    _, sample = samples()
    assert sum(each["new_tokens"] for each in decisions) == sample["tokens"] - 1  # the prefill's
    assert all(len(each["expected_seconds"]) == len(each["sizes"]) for each in decisions)
    assert all(each["pass_tokens"] >= 1 and each["seconds"] > 0 for each in decisions)
    assert any(each["expected_tokens"] for each in decisions)
    assert {each["name"] for each in decisions} == {"writing/81, turn 1"}


def test_every_setting_of_token_recycling_is_measured_and_plotted(model):
    assert recycling_settings.main(model) == 0
    measured = [(sample["method"], sample["nodes"]) for sample in samples()]
    assert measured == [(each.name, each.nodes) for each in recycling_settings.all_methods()]
    assert Path("out/settings.png").read_bytes().startswith(b"\x89PNG")
