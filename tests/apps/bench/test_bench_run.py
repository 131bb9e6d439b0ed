"""`hf-refspec bench` measures suites, keeps what it has measured, and reports."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

import hf_refspec as rs
from hf_refspec.apps.bench.measure import Bench
from hf_refspec.apps.bench.methods import (
    BLEND,
    COMPILED,
    DEFAULT,
    LOOK_UP,
    PLAIN,
    REPRODUCIBLE,
    Method,
)
from hf_refspec.apps.bench.results import read_results
from hf_refspec.apps.cli.main import main


@pytest.fixture
def replay(tmp_path, data, tokenizer, monkeypatch):
    """The arguments of a replay with a tiny model of bytes, without suites."""
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    monkeypatch.chdir(tmp_path)
    given = ["--replay", "--random-model", "tiny", "--tokenizer", "tokenizer", "--device", "cpu"]
    return [*given, "--data", "data", "--out", "out"]


@pytest.fixture
def model(tmp_path, data, tokenizer, byte_llama, monkeypatch):
    """The arguments of a run in which a model of bytes says what it likes, without suites."""
    byte_llama.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    given = ["--model", "model", "--max-new-tokens", "10", "--device", "cpu"]
    return [*given, "--data", "data", "--out", "out"]


def entries(suite: str) -> list[dict]:
    return read_results(Path("out"))["suites"][f"{suite}, float32"]["entries"]


def names(suite: str) -> list[str]:
    return [entry["name"] for entry in entries(suite)]


def test_replays_every_suite_that_has_answers(replay, capsys):
    suites = ["rag", "humaneval", "spec-bench", "multi-turn"]
    assert main(["bench", *suites, *replay]) == 0
    assert names("rag") == ["1", "2", "3"]
    assert names("humaneval") == ["1", "2"]
    assert names("spec-bench") == ["math/101, turn 1", "translation/161, turn 1"]
    assert names("multi-turn") == ["math/101, turn 1", "math/101, turn 2"]
    tokens = [entry["samples"][0]["tokens"] for entry in entries("multi-turn")]
    assert tokens == [12, 12]  # with EOS
    results = read_results(Path("out"))
    assert results["settings"]["random model"] == "tiny"
    assert results["settings"]["dtype"] == "float32"
    assert results["machine"]["cores"] >= 1 and results["versions"]["torch"] == torch.__version__

    report = Path("out/report.md").read_text(encoding="utf-8")
    printed, told = capsys.readouterr()
    assert printed.strip() in report
    for suite in suites:
        assert f"## {suite}, float32\n" in report
        assert f"warning: {suite}, float32: few prompts (" in told
    assert "## All suites, float32\n" in report
    assert "| method | nodes | math | translation |" in report
    assert "](speed_ups.png)" in report
    assert Path("out/speed_ups.png").read_bytes().startswith(b"\x89PNG")


def test_articles_are_summarised(replay, data):
    article = {"question_id": 9, "category": "summarization", "turns": ["Sum up: a cat sat."]}
    with (data / "spec_bench_questions.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({**article, "reference": ["a cat"]}) + "\n")
    assert main(["bench", "summarization", *replay]) == 0
    assert names("summarization") == ["summarization/9, turn 1"]


def test_static_caches_are_measured_beside_the_others(model, monkeypatch, capsys):
    """Uncompiled: what compiling adds is asked elsewhere."""
    uncompiled = {"cache_implementation": "static", "max_cache_len": 128, "disable_compile": True}
    monkeypatch.setattr("hf_refspec.apps.bench.run.static_options", lambda *_: uncompiled)
    options = ["--static", "128", "--limit", "1", "--nodes", "8"]
    assert main(["bench", "spec-bench", *model, *options]) == 0
    [entry] = entries("spec-bench")
    samples = {sample["method"]: sample for sample in entry["samples"]}
    for name in (f"{PLAIN}, {COMPILED}", f"{DEFAULT}, {COMPILED}", f"{PLAIN}, {REPRODUCIBLE}"):
        assert samples[name]["tokens"] == samples[PLAIN]["tokens"]
        assert samples[name]["first_difference"] is None
    assert "compiled in" in capsys.readouterr().out


def test_a_model_writes_freely(model):
    options = ["--limit", "1", "--dtype", "float32", "bfloat16"]
    assert main(["bench", "cached-sessions", "multi-turn", *model, *options]) == 0
    suites = [
        f"{suite}, {dtype}" for dtype in options[3:] for suite in ("cached-sessions", "multi-turn")
    ]
    assert list(read_results(Path("out"))["suites"]) == suites
    assert "## All suites, bfloat16\n" in Path("out/report.md").read_text(encoding="utf-8")
    [entry] = entries("cached-sessions")
    samples = {(s["method"], s["nodes"]): s for s in entry["samples"]}
    assert samples["plain generate", 0]["forward_passes"] == 10
    # Similar questions were answered four times before.
    cached, uncached = samples["blend", 64], samples["ReferenceCopy", 64]
    assert cached["forward_passes"] <= uncached["forward_passes"]
    assert names("multi-turn") == ["writing/81, turn 1", "writing/81, turn 2"]


def measured(entry: dict) -> list[tuple]:
    return [(sample["method"], sample["nodes"]) for sample in entry["samples"]]


def test_only_the_methods_and_budgets_that_are_named_are_measured(model):
    chosen = ["--methods", "ReferenceCopy", DEFAULT, "--nodes", "auto", "4"]
    assert main(["bench", "spec-bench", *model, "--limit", "2", *chosen]) == 0
    first, _ = entries("spec-bench")
    named = [(name, nodes) for name in ("ReferenceCopy", DEFAULT) for nodes in ("auto", 4)]
    assert measured(first) == [(PLAIN, 0), *named]
    assert {sample["other_tokens"] for sample in first["samples"]} == {0}
    report = Path("out/report.md").read_text(encoding="utf-8")
    assert "| texts equal | regret |" in report and "| ReferenceCopy \\| TokenRecycling |" in report


def test_questions_of_a_category_are_the_rows_of_a_batch(model, data):
    with open(data / "spec_bench_questions.jsonl", "a", encoding="utf-8") as file:
        for number in (82, 83):
            question = {"question_id": number, "category": "writing", "turns": ["x" * number]}
            file.write(json.dumps(question) + "\n")
    chosen = ["--batch-size", "2", "--methods", "ReferenceCopy", DEFAULT, "--nodes", "8"]
    assert main(["bench", "spec-bench", *model, *chosen]) == 0
    batches = ["writing/81, 82", "math/101", "translation/161", "rag/321", "writing/83"]
    assert names("spec-bench") == batches
    plain, copying, recycling = entries("spec-bench")[0]["samples"]
    assert plain["tokens"] == plain["forward_passes"] == copying["tokens"] == recycling["tokens"]
    assert {copying["other_tokens"], recycling["other_tokens"]} == {0}
    assert 2 * 10 // 9 <= recycling["forward_passes"] < plain["forward_passes"] == 20


def test_sampling_is_compared_with_plain_sampling(model):
    """Without prompt look-up, which draws other random numbers."""
    assert main(["bench", "spec-bench", *model, "--limit", "1", "--temperature", "0.9"]) == 0
    [entry] = entries("spec-bench")
    methods = [method for method, _ in measured(entry)]
    assert LOOK_UP not in methods and BLEND in methods
    assert {sample["other_tokens"] for sample in entry["samples"]} == {0}


def test_a_recycling_table_is_begun_with(model, byte_llama, tokenizer):
    table = rs.TokenRecycling.build(byte_llama, tokenizer, ["Tell a tale."], progress=False)
    table.save_pretrained("table")
    name = f"{DEFAULT}, with a table"
    chosen = ["--recycling-table", "table", "--methods", name, "--nodes", "8"]
    assert main(["bench", "spec-bench", *model, "--limit", "1", *chosen]) == 0
    assert measured(entries("spec-bench")[0]) == [(PLAIN, 0), (name, 8)]


def test_random_text_is_forced_up_to_a_number_of_tokens(replay):
    options = ["--limit", "1", "--max-new-tokens", "6"]
    assert main(["bench", "no-overlap", *replay, *options]) == 0
    [entry] = entries("no-overlap")
    assert {sample["tokens"] for sample in entry["samples"]} == {6}
    settings = read_results(Path("out"))["settings"]  # a folder by its name
    assert settings["tokenizer"] == "tokenizer" and settings["replay"] is True
    assert "limit" not in settings and "data" not in settings


def test_ctrl_c_keeps_what_was_measured(replay, monkeypatch, capsys):
    measure, asked = Bench.measure, []

    def interrupted(bench, name, *others):
        asked.append(name)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return measure(bench, name, *others)

    monkeypatch.setattr(Bench, "measure", interrupted)
    assert main(["bench", "rag", *replay]) == 130
    printed = capsys.readouterr().out
    assert "1 of 3 questions" in printed and "Stopped; out has what was measured." in printed
    assert names("rag") == ["1"]
    assert main(["bench", "rag", *replay]) == 2
    assert "results.json exists; choose another --out" in capsys.readouterr().err
    assert names("rag") == ["1"]


def shorten_context(length: int) -> None:
    config = json.loads(Path("model/config.json").read_text())
    Path("model/config.json").write_text(json.dumps({**config, "max_position_embeddings": length}))


def test_a_prompt_that_the_context_does_not_hold_is_skipped_and_counted(model, capsys):
    shorten_context(110)
    assert main(["bench", "multi-turn", *model]) == 0
    report = capsys.readouterr().out
    assert "2 of 2 questions, 2 of them skipped, at least in part" in report
    assert "writing/81, turn 2 has " in report and "context of 110" in report
    assert "writing/81, turn 1" in names("multi-turn")
    assert "writing/81, turn 2" not in names("multi-turn")


def test_nothing_measured_is_no_success(model, capsys):
    shorten_context(10)
    assert main(["bench", "rag", *model]) == 1
    message = "Nothing was measured: no question fits into the model's context."
    assert message in capsys.readouterr().out


def test_other_ids_stop_it(model, monkeypatch, capsys):
    wrong = Method("wrong", options={"bad_words_ids": [[token] for token in range(60, 200)]})
    methods = [Method(PLAIN), wrong]
    monkeypatch.setattr("hf_refspec.apps.bench.run.decoding_methods", lambda *_: methods)
    assert main(["bench", "rag", *model]) == 1
    assert "wrong returns other ids than plain generate" in capsys.readouterr().out


MISSING = [
    (["no-overlap", "--out", "out"], "add --replay"),
    (["rag", "--out", "out"], "llma_rag.jsonl is needed; name its folder with --data"),
    (["rag"], "--out is missing"),
    (["rag", "--out", "out", "--batch-size", "2"], "--batch-size is for spec-bench alone"),
    (["spec-bench", "--out", "out", "--temperature", "0"], "--temperature 0.0 must be above 0"),
    (["rag", "--out", "out", "--random-model", "tiny"], "add --replay to --random-model tiny"),
    (["rag", "--out", "out", "--tokenizer", "x"], "--tokenizer x is for --random-model"),
]
WRONG = [
    (["rags"], "'rags' is no suite; there are rag, humaneval, spec-bench"),
    (["cached-sessions"], "needs the model's own answers"),
    (["rag", "--data", "elsewhere"], "elsewhere/llma_rag.jsonl is missing"),
    (["rag", "--model", "model"], "two models"),
    (["rag", "--tokenizer", "no/tokenizer/here"], "no/tokenizer/here"),
    (["rag", "--datastore", "no/store/here"], "no/store/here"),
    (["spec-bench", "--batch-size", "2"], "--batch-size is for text that the model writes"),
    (["rag", "--methods", "x"], "--methods has 'x', but there are only LLMA's algorithm,"),
    (["humaneval"], "no question for humaneval in data"),
    (["rag", "--device-map", "auto"], "leave out --device and --random-model"),
]


@pytest.mark.parametrize(
    ("begun", "arguments", "message"),
    [*((False, *each) for each in MISSING), *((True, *each) for each in WRONG)],
)
def test_bad_input_is_named_before_work_starts(replay, data, capsys, begun, arguments, message):
    (data / "HumanEval.jsonl.gz").write_bytes(gzip.compress(b""))
    assert main(["bench", *(replay if begun else ["--device", "cpu"]), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("hf-refspec: ")
    assert not Path("out").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused(replay, capsys):
    assert main(["bench", "rag", *replay, "--device", "cuda"]) == 2
    assert "torch sees no GPU" in capsys.readouterr().err
