"""The suite `ralm`: all retrievers, all methods, the same ids; bad input named."""

from __future__ import annotations

import json
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
from encoders import letters, load_letters
from ralm_suite import WITH_DRAFTS, PaddedKnowledgeBase
from retrieval_bench import main
from retrieval_settings import BASELINE, OURS, speculations

from hf_refspec.apps.bench.methods import LOOK_UP, transformers_methods
from hf_refspec.apps.bench.results import read_results
from hf_refspec.retrieval.dense import DenseRetriever
from hf_refspec.retrieval.knowledge_base import KnowledgeBase

TEXTS = [f"{name} is a {kind} cat." for name in ("Tom", "Kit", "Al") for kind in ("small", "big")]
ENCODER = "letters-64"
MAIN = {*speculations(ablate=False), *(method.name for method in transformers_methods())}
MAIN |= {f"{name}{WITH_DRAFTS}" for name in (BASELINE, OURS)}


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """What is nowhere is looked for on the Hub, which must not be waited for."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.fixture(scope="module")
def base(tmp_path_factory, tokenizer) -> str:
    folder = tmp_path_factory.mktemp("base") / "base"
    KnowledgeBase.build(TEXTS, tokenizer, letters(64), folder, progress=False)
    return str(folder)


@pytest.fixture
def given(tmp_path, data, tokenizer, monkeypatch) -> list[str]:
    """The arguments of a replay, without a knowledge base."""
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ralm_suite.load_encoder", load_letters)
    model = ["--random-model", "tiny", "--tokenizer", "tokenizer", "--device", "cpu", "--replay"]
    return ["ralm", *model, "--data", "data", "--out", "out"]


def measured() -> list[dict]:
    suites = read_results(Path("out"))["suites"]
    return [{"suite": name, **entry} for name in suites for entry in suites[name]["entries"]]


def test_measures_all_retrievers_by_all_methods(given, base, capsys):
    options = ["--encoder", ENCODER, "--distractors", "50", "--limit", "2"]
    assert main([*given, "--knowledge-base", base, *options]) == 0
    entries = measured()
    assert [(entry["suite"], entry["name"]) for entry in entries] == [
        (f"ralm, {retriever} to search, float32", name)
        for retriever in ("flat, 56", "hnsw, 6", "bm25, 6")
        for name in "12"
    ]
    for entry in entries:
        assert entry["samples"][0]["method"] == BASELINE
        assert {sample["method"] for sample in entry["samples"]} == MAIN
        assert len({sample["tokens"] for sample in entry["samples"]}) == 1
    assert entries[0]["samples"][0]["tokens"] == 14  # the answer and its end
    assert entries[0]["samples"][0]["figures"]["searches"] == 4
    assert read_results(Path("out"))["settings"]["distractors"] == 50

    report = Path("out/report.md").read_text(encoding="utf-8")
    assert capsys.readouterr().out.strip() in report
    assert "## ralm, flat, 56 to search, float32\n" in report
    assert report.count(f"| {LOOK_UP} |") == 3


def test_bm25_needs_no_encoder_and_a_model_that_writes_freely_gets_spec_bench(
    given, data, base, byte_llama, tokenizer, monkeypatch, capsys
):
    byte_llama.save_pretrained("model")
    tokenizer.save_pretrained("model")
    arguments = ["ralm", "--model", "model", "--device", "cpu", "--data", "data", "--limit", "1"]
    arguments += ["--knowledge-base", base, "--max-new-tokens", "9"]
    assert main([*arguments, "--out", "out"]) == 0
    [entry] = measured()
    assert entry["name"] == "writing/81" and "bm25" in entry["suite"]
    assert {sample["tokens"] for sample in entry["samples"]} == {9}
    monkeypatch.setattr("hf_refspec.apps.bench.measure.context_length", lambda model: 20)
    assert main([*arguments, "--out", "short"]) == 1
    printed = capsys.readouterr().out
    assert "1 of them skipped" in printed and "Nothing was measured" in printed


def test_ablates_every_retriever_with_more_prefetching_than_a_graph_walks(given, base):
    options = ["--encoder", ENCODER, "--limit", "1", "--max-new-tokens", "6", "--ablate"]
    assert main([*given, "--knowledge-base", base, *options]) == 0
    entries = measured()
    assert len(entries) == 3
    for entry in entries:
        assert set(speculations(ablate=True)) <= {sample["method"] for sample in entry["samples"]}


def test_a_datasets_questions_are_drawn_by_the_seed(
    given, base, byte_llama, tokenizer, monkeypatch, capsys
):
    byte_llama.save_pretrained("model")
    tokenizer.save_pretrained("model")
    Path("qa").mkdir()
    lines = [json.dumps({"question": f"who is cat {i // 2}?"}) for i in range(20)]
    Path("qa/validation.jsonl").write_text("\n".join(lines), encoding="utf-8")
    questions = ["--knowledge-base", base, "--prompts", "qa", "--max-new-tokens", "4"]
    asked = []
    monkeypatch.setattr(
        "retrieval_bench.chat_prompt", lambda turns, tokenizer: asked.append(turns[0]) or [5]
    )
    for seed in ("0", "0", "1"):
        given = ["ralm", "--model", "model", "--device", "cpu", "--out", f"out{len(asked)}"]
        assert main([*given, *questions, "--limit", "1", "--seed", seed]) == 0
    assert len(asked) == 30 and len(set(asked)) == 10
    assert asked[:10] == asked[10:20] != asked[20:]
    with pytest.raises(SystemExit):
        main([*given, *questions, "--replay"])
    assert "leave out --replay" in capsys.readouterr().err


def test_distractors_are_looked_at_but_not_found(base, tokenizer):
    padded = PaddedKnowledgeBase(base, tokenizer, 2000)
    assert len(padded) == 2006 and padded.embeddings.shape == (2006, 64)
    lengths = np.linalg.norm(padded.embeddings[6:], axis=1)
    assert lengths == pytest.approx(np.ones(2000), abs=1e-5)
    query = padded.embeddings[1]
    plain = KnowledgeBase(base, tokenizer)
    retrievers = [DenseRetriever(each, lambda texts: None) for each in (plain, padded)]
    found = [retriever.search([query], 1)[0].ids.tolist() for retriever in retrievers]
    assert found[0] == found[1]
    assert 1 <= len(padded.passage(2005)) <= 4
    with pytest.raises(IndexError):
        padded.passage(2006)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--knowledge-base", "no/base"], "no/base"),
        (["--knowledge-base", "BASE", "--distractors", "5"], "need --encoder"),
        (["--knowledge-base", "SPARSE", "--encoder", "ENCODER"], "have 0; use the encoder"),
    ],
)
def test_what_does_not_fit_is_named_before_work_starts(
    given, tmp_path, base, tokenizer, arguments, message
):
    KnowledgeBase.build(TEXTS, tokenizer, None, tmp_path / "sparse", progress=False)
    places = {"BASE": base, "ENCODER": ENCODER, "SPARSE": "sparse"}
    with pytest.raises((OSError, ValueError), match=message):
        main([*given, *(places.get(each, each) for each in arguments)])
    assert not Path("out").exists()
