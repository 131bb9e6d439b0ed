"""scripts/gpu_bench runs small on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hf_refspec.bench.results import read_results

SCRIPT = str(Path(__file__).parents[2] / "scripts" / "gpu_bench")


def gpu_bench(*arguments: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHON": sys.executable}
    return subprocess.run([SCRIPT, *arguments], capture_output=True, text=True, env=environment)


def test_measures_three_suites(tmp_path, data, tokenizer):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    small = ["--random-model", "tiny", "--device", "cpu", "--limit", "1", "--max-new-tokens", "20"]
    small += ["--tokenizer", str(tmp_path / "tokenizer")]
    done = gpu_bench(*small, "--data", str(data), "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    results = read_results(tmp_path / "out")
    suites = [suite["suite"] for suite in results["suites"].values()]
    assert suites == ["rag", "humaneval", "no-overlap"]
    assert results["settings"]["dtype"] == "bfloat16" and results["settings"]["replay"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_refused(tmp_path, data):
    done = gpu_bench("--data", str(data), "--out", str(tmp_path / "out"))
    assert done.returncode == 2
    assert "torch sees no GPU" in done.stderr
    assert not (tmp_path / "out").exists()
