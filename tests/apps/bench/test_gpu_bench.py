"""scripts/gpu_bench: what it measures, in small, and how it says what was reached."""

from __future__ import annotations

import os
import subprocess
import sys
from math import inf
from pathlib import Path

import pytest
import torch

from hf_refspec.apps.bench.gpu import NEW_TOKENS, Text, gpu_methods, main, measure_texts, warm_up
from hf_refspec.apps.bench.gpu_report import Run, Stage, gpu_report, label
from hf_refspec.apps.bench.measure import Bench
from hf_refspec.apps.bench.methods import DEFAULT, PLAIN
from hf_refspec.apps.bench.models import forced_model
from hf_refspec.hook import install

SCRIPT = str(Path(__file__).parents[3] / "scripts" / "gpu_bench")
# Static caches as on a GPU, but not compiled: that takes minutes on a CPU.
STATIC = {"cache_implementation": "static", "max_cache_len": 64 + NEW_TOKENS}


def texts(rows: int, seed: int = 0) -> list[Text]:
    """Answers that repeat a part of their prompts."""
    ids = torch.randint(3, 250, (rows, 40), generator=torch.Generator().manual_seed(seed)).tolist()
    return [Text(row[: 30 - i], [*row[4:16], *row[30:40]]) for i, row in enumerate(ids)]


@pytest.fixture(scope="module")
def bench(tokenizer) -> Bench:
    install()
    return Bench(forced_model("tiny", len(tokenizer)), tokenizer, list, False, NEW_TOKENS)


@pytest.mark.parametrize("rows", [1, 3])
def test_all_methods_write_the_texts_that_are_forced(bench, rows):
    methods = [each for each in gpu_methods(STATIC) if rows == 1 or "look-up" not in each.name]
    batch = texts(rows)
    entry = measure_texts(bench, "a batch", batch, methods)
    for sample in entry["samples"]:
        assert (sample["tokens"], sample["other_tokens"]) == (22 * rows, 0)
        assert sample["prefill_seconds"] > 0 and sample["decoding_seconds"] > 0
    passes = {label(s["method"], s["nodes"]): s["forward_passes"] for s in entry["samples"]}
    assert passes[PLAIN] == passes[f"{PLAIN}, compiled"] == passes[f"{PLAIN}, reproducible"]
    assert passes[PLAIN] == 22 * rows
    for name in (f"{DEFAULT}, 64", f"{DEFAULT}, compiled, 64"):
        assert passes[name] < 22 * rows
    assert bench.model.texts[rows - 1, : len(batch[-1].prompt_ids)].tolist() == batch[-1].prompt_ids


def test_a_forced_model_writes_as_it_would_where_it_is_not_on_the_text(tokenizer):
    model = forced_model("tiny", len(tokenizer))
    ids, places = torch.arange(3, 13)[None], torch.arange(10)[None]
    with torch.no_grad():
        unforced = model(ids, position_ids=places).logits[0]
        model.force([[3, 4, 99, 6, 7]])
        forced = model(ids, position_ids=places).logits[0]
    assert forced.argmax(dim=-1)[[0, 1, 3]].tolist() == [4, 99, 7]
    off_the_text = [2, 4, *range(5, 10)]
    assert torch.equal(forced[off_the_text], unforced[off_the_text])


def test_methods_that_fail_or_have_no_time_are_left_out(bench):
    stage, methods = Stage("small"), gpu_methods({"cache_implementation": "none such"})
    warm_up(stage, bench, methods, 1, 40, 1e12, {f"{DEFAULT}, 64": inf})
    names = [label(method.name, method.nodes) for method in bench.methods]
    assert names == [PLAIN, "prompt look-up of transformers, 10", f"{DEFAULT}, auto"]
    assert stage.left_out[0] == f"{DEFAULT}, 64: there was no time to warm it up"
    assert [each.partition(":")[0] for each in stage.left_out[1:]] == [
        label(method.name, method.nodes) for method in methods[4:]
    ]
    assert all("Error" in each for each in stage.left_out[1:])
    assert list(stage.first_seconds) == names


def sample(method: str, nodes: int | str, seconds: float) -> dict:
    about = {"method": method, "nodes": nodes, "tokens": 101, "forward_passes": 50}
    about |= {"prefill_seconds": 1.0, "decoding_seconds": seconds, "other_tokens": 0}
    about |= {"first_difference": None, "retrieval": None}
    return about | {"drafting_seconds": 0.0, "learning_seconds": 0.0}


def test_the_report_has_a_row_for_each_method():
    seconds = {
        (PLAIN, 0): 8.0,
        (DEFAULT, "auto"): 2.5,
        (DEFAULT, 64): 2.0,
        (f"{PLAIN}, compiled", 0): 4.0,
        (f"{DEFAULT}, compiled", "auto"): 1.0,
        (f"{DEFAULT}, compiled", 64): 1.25,
    }
    samples = [sample(*key, value) for key, value in seconds.items()]
    entries = {"rag": [{"name": "1", "samples": samples}]}
    slow = [sample(PLAIN, 0, 1.0), sample(DEFAULT, 64, 2.0)]
    entries["no-overlap"] = [{"name": "1", "samples": slow}]
    stage = Stage("A model", entries, {PLAIN: 12.3}, {PLAIN: 3 << 30})
    about = {"machine": {"gpu": "NVIDIA X"}, "versions": {"torch": "2"}}
    report = gpu_report(Run(about, [stage], ["a suite: no data"]))
    assert report.startswith("# NVIDIA X\n")
    assert "- a suite: no data" in report
    assert "| plain generate |  | 12.5 | 1.00x | 0.50x | 2.02 | 1 of 1 | 12.3 | 3.0 |" in report


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_refused(tmp_path, data):
    environment = {**os.environ, "PYTHON": sys.executable}
    command = [SCRIPT, "--out", str(tmp_path / "out"), "--data", str(data)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 2
    assert "torch sees no GPU" in done.stderr and len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--data", "nowhere"], "--data nowhere is no folder"),
        (["--seconds", "0"], "--seconds must be above 0"),
    ],
)
def test_bad_options_are_refused(tmp_path, data, capsys, arguments, message):
    options = ["--small", "--out", str(tmp_path / "out"), "--data", str(data), *arguments]
    assert main(options) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
