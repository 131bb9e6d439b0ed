"""scripts/gpu_bench runs small on a CPU."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch

from hf_refspec.bench.results import Results

SCRIPT = str(Path(__file__).parents[2] / "scripts" / "gpu_bench")


def gpu_bench(monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", [SCRIPT, *arguments])
    with pytest.raises(SystemExit) as exit:
        runpy.run_path(SCRIPT, run_name="__main__")
    return exit.value.code


def test_measures_three_suites_and_prints_the_tables_last(tmp_path, data, monkeypatch, capsys):
    small = ["--random-model", "tiny", "--device", "cpu", "--limit", "1", "--max-new-tokens", "20"]
    out = tmp_path / "out"
    assert gpu_bench(monkeypatch, *small, "--data", str(data), "--out", str(out)) == 0
    results = Results.read(out)
    assert list(results.suites) == ["rag", "humaneval", "no-overlap"]
    assert results.settings["dtype"] == "bfloat16" and results.settings["replay"]
    assert capsys.readouterr().out.splitlines()[-2].startswith("| blend | 64 | ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(tmp_path, data, monkeypatch, capsys):
    arguments = ["--data", str(data), "--out", str(tmp_path / "out")]
    assert gpu_bench(monkeypatch, *arguments) == 2
    assert "torch sees no GPU" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_missing_data_file_is_named(tmp_path, monkeypatch, capsys):
    small = ["--random-model", "tiny", "--device", "cpu"]
    assert gpu_bench(monkeypatch, *small, "--data", str(tmp_path), "--out", "out") == 2
    assert "llma_rag.jsonl is missing" in capsys.readouterr().err
