"""scripts/gpu_bench: what it measures, in small."""

from __future__ import annotations

import os
import subprocess
import sys
from math import inf
from pathlib import Path

import gpu_bench
import pytest
import torch
from gpu_bench import NEW_TOKENS, ForcedLlama, Text, decode, gpu_methods, measure, warm_up

from hf_refspec.apps.bench.measure import Bench
from hf_refspec.apps.bench.methods import DEFAULT, LOOK_UP, PLAIN
from hf_refspec.apps.bench.models import random_model
from hf_refspec.apps.bench.results import new_results, read_results
from hf_refspec.hook import install

SCRIPT = str(Path(__file__).parents[2] / "scripts" / "gpu_bench")
# Static caches as on a GPU, but not compiled: that takes minutes on a CPU.
STATIC = {"cache_implementation": "static", "max_cache_len": 64 + NEW_TOKENS}


def texts(rows: int) -> list[Text]:
    """Answers that repeat a part of their prompts."""
    ids = torch.randint(3, 250, (rows, 40), generator=torch.Generator().manual_seed(0)).tolist()
    return [Text(row[: 30 - i], [*row[4:16], *row[30:40]]) for i, row in enumerate(ids)]


@pytest.fixture
def bench(tokenizer) -> Bench:
    install()
    return Bench(
        random_model("tiny", len(tokenizer), kind=ForcedLlama), tokenizer, list, False, NEW_TOKENS
    )


@pytest.mark.parametrize("rows", [1, 3])
def test_all_methods_write_the_texts_that_are_forced(bench, rows):
    bench.methods = gpu_methods(STATIC, rows)
    [entry] = decode("a batch", texts(rows), bench)
    for sample in entry["samples"]:
        assert (sample["tokens"], sample["other_tokens"]) == (22 * rows, 0)
    passes = {(s["method"], s["nodes"]): s["forward_passes"] for s in entry["samples"]}
    assert ((LOOK_UP, 10) in passes) == (rows == 1)
    for name in (PLAIN, f"{PLAIN}, compiled", f"{PLAIN}, reproducible"):
        assert passes[name, 0] == 22 * rows
    for name in (DEFAULT, f"{DEFAULT}, compiled"):
        assert passes[name, 64] < 22 * rows


def test_a_forced_model_writes_as_it_would_where_it_is_not_on_the_text(tokenizer):
    model = random_model("tiny", len(tokenizer), kind=ForcedLlama)
    ids, places = torch.arange(3, 13)[None], torch.arange(10)[None]
    with torch.no_grad():
        unforced = model(ids, position_ids=places).logits[0]
        model.force([[3, 4, 99, 6, 7]])
        forced = model(ids, position_ids=places).logits[0]
    assert forced.argmax(dim=-1)[[0, 1, 3]].tolist() == [4, 99, 7]
    off_the_text = [2, 4, *range(5, 10)]
    assert torch.equal(forced[off_the_text], unforced[off_the_text])


def test_methods_that_fail_or_have_no_time_are_left_out(bench):
    methods = gpu_methods({"cache_implementation": "none such"})
    names, left_out = warm_up(bench, methods, 1, 40, inf)
    assert names == [PLAIN, f"{LOOK_UP}, 10", f"{DEFAULT}, auto", f"{DEFAULT}, 64"]
    assert len(left_out) == len(methods) - 4 and all("Error" in each for each in left_out)
    names, left_out = warm_up(bench, methods, 1, 40, 0.0)
    assert names == [PLAIN] and "no time to warm it up" in left_out[0]


def test_batches_of_all_suites_are_measured_until_the_time_is_up(bench, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_bench, "static_options", lambda *_: STATIC)
    results, left_out = new_results(tmp_path, {}, "cpu"), []
    suites = {"rag": texts(5), "spec-bench": texts(2)}
    measure(bench, "tiny", suites, 2, inf, results, left_out, tmp_path)
    suite = "rag, float32, tiny, 2 texts at a time"
    assert len(read_results(tmp_path)["suites"][suite]["entries"]) == 2
    measure(bench, "tiny", suites, 1, 0.0, results, left_out, tmp_path)
    assert left_out == ["tiny, 1 text at a time: the time was up"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_refused(tmp_path, data):
    environment = {**os.environ, "PYTHON": sys.executable}
    command = [SCRIPT, "--out", str(tmp_path / "out"), "--data", str(data)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 2
    assert "torch sees no GPU" in done.stderr and len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()
