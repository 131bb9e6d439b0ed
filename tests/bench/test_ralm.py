"""`hf-refspec bench ralm`: all retrievers, all ways, the same ids; resumed; bad input named."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
from encoders import letters, load_letters

from hf_refspec.bench.distractors import PaddedKnowledgeBase
from hf_refspec.bench.methods import (
    BASELINE,
    LOOK_UP,
    OURS,
    ablations,
    main_speculations,
    strides,
    transformers_methods,
)
from hf_refspec.bench.ralm import WITH_DRAFTS
from hf_refspec.bench.registry import REGISTRY
from hf_refspec.bench.results import Results
from hf_refspec.cli import main
from hf_refspec.retrieval.dense import DenseRetriever
from hf_refspec.store.knowledge_base import KnowledgeBase

TEXTS = [f"{name} is a {kind} cat." for name in ("Tom", "Kit", "Al") for kind in ("small", "big")]
ENCODER = "letters-64"
MAIN = {*main_speculations(), *(method.name for method in transformers_methods())}
MAIN |= {f"{name}{WITH_DRAFTS}" for name in (BASELINE, OURS)}
ALL = {*MAIN, *ablations(), *strides()}


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
    monkeypatch.setattr("hf_refspec.bench.ralm.load_encoder", load_letters)
    model = ["--random-model", "tiny", "--tokenizer", "tokenizer", "--device", "cpu", "--replay"]
    return ["bench", "ralm", *model, "--data", "data", "--out", "out"]


def done() -> dict:
    return Results.read(Path("out")).suites["ralm"]["done"]


def test_measures_all_retrievers_by_all_methods(given, base, capsys):
    options = ["--encoder", ENCODER, "--distractors", "50", "--limit", "2", "--ablate", "1"]
    assert main([*given, "--knowledge-base", base, *options]) == 0
    first, second = (
        [entry for each in done().values() for entry in each["entries"] if entry["name"] == name]
        for name in "12"
    )
    assert [(entry["retriever"], entry["passages"]) for entry in first] == [
        ("flat", 56),
        ("hnsw", 6),
        ("bm25", 6),
    ]
    for entry in first:
        assert {sample["method"] for sample in entry["samples"]} == ALL
        assert {sample["tokens"] for sample in entry["samples"]} == {14}  # the answer and its end
    for entry in second:
        assert entry["samples"][0]["method"] == BASELINE
        assert {sample["method"] for sample in entry["samples"]} == MAIN
    baseline = second[0]["samples"][0]["retrieval"]
    assert baseline["searches"] == baseline["retrievals"] == baseline["steps"] == 4
    assert Results.read(Path("out")).settings["distractors"] == 50

    report = Path("out/report.md").read_text(encoding="utf-8")
    assert capsys.readouterr().out.strip() in report
    for heading in ("### flat, 56 to search", "### hnsw, 6 to search", "### bm25, 6 to search"):
        assert heading in report
    assert report.count("| OS3 | OS3 against the best |") == 3
    assert report.count(f"| {LOOK_UP} |") == 3


def test_a_milvus_is_searched_as_well(given, base):
    pytest.importorskip("milvus_lite")
    options = ["--encoder", ENCODER, "--milvus", "passages.db", "--limit", "1", "--ablate", "0"]
    assert main([*given, "--knowledge-base", base, *options]) == 0
    retrievers = [each["entries"][0]["retriever"] for each in done().values()]
    assert retrievers == ["flat", "hnsw", "milvus", "bm25"]
    assert {sample["method"] for sample in done()["1, milvus"]["entries"][0]["samples"]} == MAIN
    assert Results.read(Path("out")).settings["milvus"] is True


def test_bm25_needs_no_encoder_and_a_model_that_talks_gets_spec_bench(
    given, data, base, byte_llama, tokenizer
):
    byte_llama.save_pretrained("model")
    tokenizer.save_pretrained("model")
    arguments = ["bench", "ralm", "--model", "model", "--device", "cpu", "--data", "data"]
    arguments += ["--max-new-tokens", "9", "--ablate", "0"]
    assert main([*arguments, "--out", "out", "--knowledge-base", base, "--limit", "1"]) == 0
    [entry] = done()["writing/81, bm25"]["entries"]
    assert entry["retriever"] == "bm25"
    assert {sample["tokens"] for sample in entry["samples"]} == {9}


def test_ctrl_c_keeps_what_was_measured_and_resume_goes_on(given, base, monkeypatch, capsys):
    suite, asked = REGISTRY["ralm"], []

    def interrupted(bench, question):
        asked.append(question.id)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return suite.measure(bench, question)

    monkeypatch.setitem(REGISTRY, "ralm", dataclasses.replace(suite, measure=interrupted))
    arguments = [*given, "--knowledge-base", base, "--repeat", "2", "--ablate", "0"]
    assert main(arguments) == 130
    assert "1 of 5 questions" in capsys.readouterr().out
    before = done()["1, bm25"]
    assert [sample["run"] for sample in before["entries"][0]["samples"]] == [0] * 7 + [1] * 7
    assert main([*arguments, "--resume"]) == 0
    names = ["1", "2", "2", "3", "math/101", "translation/161"]
    assert asked == [f"{name}, bm25" for name in names]
    assert done()["1, bm25"] == before
    assert main([*arguments, "--resume", "--repeat", "3"]) == 2
    assert "was measured with repeat 2, not 3" in capsys.readouterr().err


def test_a_question_that_the_context_does_not_hold_is_skipped(
    given, data, base, byte_llama, tokenizer, monkeypatch, capsys
):
    byte_llama.save_pretrained("model")
    tokenizer.save_pretrained("model")
    arguments = ["bench", "ralm", "--model", "model", "--device", "cpu", "--data", "data"]
    monkeypatch.setattr("hf_refspec.bench.measure.context_length", lambda model: 20)
    assert main([*arguments, "--out", "out", "--knowledge-base", base, "--limit", "1"]) == 1
    printed = capsys.readouterr().out
    assert "1 of them skipped" in printed and "Nothing was measured" in printed


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
        ([], "name a knowledge base with --knowledge-base"),
        (["--knowledge-base", "no/base"], "--knowledge-base no/base cannot be opened"),
        (["--knowledge-base", "BASE", "--distractors", "5"], "needs --encoder"),
        (["--knowledge-base", "BASE", "--milvus", "x.db"], "--milvus x.db holds embeddings"),
        (
            ["--knowledge-base", "BASE", "--encoder", "ENCODER", "--milvus", "no/folder/x.db"],
            "Milvus at uri='no/folder/x.db' cannot be used",
        ),
        (["--knowledge-base", "BASE", "--encoder", "no/model"], "--encoder no/model does not fit"),
        (["--knowledge-base", "SPARSE", "--encoder", "ENCODER"], "built without embeddings"),
    ],
)
def test_bad_input_is_named_before_work_starts(
    given, tmp_path, base, tokenizer, capsys, arguments, message
):
    KnowledgeBase.build(TEXTS, tokenizer, None, tmp_path / "sparse", progress=False)
    places = {"BASE": base, "ENCODER": ENCODER, "SPARSE": "sparse"}
    assert main([*given, *(places.get(each, each) for each in arguments)]) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("hf-refspec: ")
    assert not Path("out").exists()
