"""`hf-refspec bench knn`: both indexes, both k, greedy and sampled; bad input named."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_refspec.bench import knn
from hf_refspec.bench.results import Results
from hf_refspec.bench.retrieval_ways import (
    WITHOUT_SKETCH,
    ablations,
    fixed_strides,
    main_ways,
    without_retrieval,
)
from hf_refspec.cli import main
from hf_refspec.demo import corpus
from hf_refspec.store.knn_datastore import KnnDatastore

MAIN = {way.name for way in [*main_ways(), *without_retrieval()]}
ALL = MAIN | {way.name for way in [*ablations(), *fixed_strides()]}


@pytest.fixture
def given(tmp_path, byte_llama, tokenizer, monkeypatch) -> list[str]:
    """The arguments of a run with a model of bytes, without a datastore."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(knn, "PROMPT", 32)
    monkeypatch.setattr(knn, "NEW_TOKENS", 8)
    byte_llama.save_pretrained("model")
    tokenizer.save_pretrained("model")
    return ["bench", "knn", "--model", "model", "--device", "cpu", "--out", "out"]


def build(model, tokenizer, tokens: int, path: str) -> None:
    text = corpus.read_source(corpus.training_files()[0])
    KnnDatastore.build(model, tokenizer, text, path, max_entries=tokens, progress=False)


def sketched(entry: dict) -> set[str]:
    return {WITHOUT_SKETCH} if entry["retriever"].startswith("flat") else set()


def test_measures_both_indexes_greedily_and_sampled(
    given, byte_llama, tokenizer, monkeypatch, capsys
):
    monkeypatch.setattr("hf_refspec.bench.registry.ABLATED_QUESTIONS", 1)
    build(byte_llama, tokenizer, 1500, "store")
    KnnDatastore("store").add_pq_index()
    assert main([*given, "--knn-datastore", "store", "--limit", "2"]) == 0
    entries = Results.read(Path("out")).entries("knn")
    first, second = entries[:8], entries[8:]
    names = [f"{index}, k={k}" for index in ("flat", "hnsw") for k in (1, 1024)]
    names = [f"{name}, {kind}" for name in names for kind in ("greedy", "sampled")]
    assert [entry["retriever"] for entry in first] == names
    for entry in first:
        ways = {sample["way"] for sample in entry["runs"]}
        assert ways == (ALL if entry["retriever"].endswith("greedy") else MAIN) | sketched(entry)
        assert {sample["tokens"] for sample in entry["runs"]} <= set(range(1, 9))
    for entry in second:
        assert {sample["way"] for sample in entry["runs"]} == MAIN | sketched(entry)
    report = capsys.readouterr().out
    assert report.count("### ") == 8 and "### hnsw, k=1024, greedy, 1,500 to search" in report
    assert report.count("| OS3 | OS3 against the best |") == 4


def test_prompts_have_names_of_their_own(tokenizer):
    prompts = knn.knn_prompts(tokenizer)
    assert len({name for name, _ in prompts}) == len(prompts) == knn.PROMPTS
    assert {len(ids) for _, ids in prompts} == {knn.PROMPT}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "with --knn-datastore"),
        (["--knn-datastore", "no/store"], "--knn-datastore no/store cannot be used"),
        (["--knn-datastore", "small"], "has 100 entries, fewer than the 1024 neighbours"),
        (["--knn-datastore", "small", "--replay"], "run it without --replay"),
    ],
)
def test_bad_input_is_named_before_work_starts(
    given, byte_llama, tokenizer, capsys, arguments, message
):
    build(byte_llama, tokenizer, 100, "small")
    assert main([*given, *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("hf-refspec: ")
    assert not Path("out").exists()


def test_the_datastore_of_another_tokenizer_is_refused(
    given, byte_llama, tokenizer, tmp_path, capsys
):
    build(byte_llama, tokenizer, 1100, "store")
    bundled = ["bench", "knn", "--device", "cpu", "--out", "out", "--knn-datastore", "store"]
    assert main(bundled) == 2
    assert "was made for another tokenizer" in capsys.readouterr().err
