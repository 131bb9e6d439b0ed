"""The suite `knn`: both indexes, both k, greedy and sampled; bad input named."""

from __future__ import annotations

import json
from pathlib import Path

import knn_suite
import numpy as np
import pytest
from knn_suite import STRIDES, SWEPT, WITHOUT_PQ_INDEX, knn_speculations
from retrieval_bench import main

from hf_refspec.apps.bench.methods import transformers_methods
from hf_refspec.apps.bench.results import read_results
from hf_refspec.ralm.knn_datastore import KnnDatastore
from hf_refspec.ralm.options import Speculation
from hf_refspec.store.build.presets import python_stdlib

METHODS = {method.name for method in transformers_methods()}
SHORT = ["--max-new-tokens", "8"]


@pytest.fixture
def given(tmp_path, byte_llama, tokenizer, monkeypatch) -> list[str]:
    """The arguments of a run with a model of bytes, without a datastore."""
    monkeypatch.chdir(tmp_path)
    byte_llama.save_pretrained("model")
    tokenizer.save_pretrained("model")
    return ["knn", "--model", "model", "--device", "cpu", "--out", "out", *SHORT]


def build(model, tokenizer, tokens: int, path: str) -> None:
    texts = (file.read_text(encoding="utf-8") for file in python_stdlib()[1:10])
    KnnDatastore.build(model, tokenizer, texts, path, max_entries=tokens, progress=False)


def test_measures_both_indexes_greedily_and_sampled(given, byte_llama, tokenizer, capsys):
    build(byte_llama, tokenizer, 1500, "store")
    KnnDatastore("store").add_pq_index()
    assert main([*given, "--knn-datastore", "store", "--limit", "1"]) == 0
    settings = [f"{index}, k={k}" for index in ("flat", "hnsw") for k in (1, 1024)]
    check_measured([f"{name}, {kind}" for name in settings for kind in ("greedy", "sampled")])
    assert "## knn, hnsw, k=1024, greedy, 1,500 to search" in capsys.readouterr().out


def test_ablates_neighbours_and_strides(given, byte_llama, tokenizer, monkeypatch):
    assert {1, 1024} <= set(SWEPT)
    monkeypatch.setattr(knn_suite, "SWEPT", (1, 64))
    build(byte_llama, tokenizer, 1500, "store")
    KnnDatastore("store").add_pq_index()
    assert main([*given, "--knn-datastore", "store", "--limit", "1", "--ablate"]) == 0
    settings = [f"{index}, k={k}, greedy" for index in ("flat", "hnsw") for k in (1, 64)]
    check_measured(settings, ablate=True)
    published = knn_speculations(ablate=True)
    for stride in STRIDES:
        speculation = published[f"as published, none, stride {stride}"]
        assert (speculation.stride, speculation.asynchronous) == (stride, False)
    assert published["as published, s"] == Speculation.published("s")


def check_measured(settings: list[str], ablate: bool = False) -> None:
    suites = read_results(Path("out"))["suites"]
    assert list(suites) == [f"knn, {name}, 1,500 to search, float32" for name in settings]
    for name, suite in suites.items():
        [entry] = suite["entries"]
        expected = {*knn_speculations(ablate), *METHODS}
        if "flat" in name:
            expected = {*expected, WITHOUT_PQ_INDEX}
        assert {sample["method"] for sample in entry["samples"]} == expected
        assert {sample["tokens"] for sample in entry["samples"]} <= set(range(1, 9))


def test_continues_the_texts_of_a_dataset_by_some_methods(given, byte_llama, tokenizer):
    build(byte_llama, tokenizer, 1500, "store")
    Path("wiki").mkdir()
    lines = [json.dumps({"text": "a = b " * length}) for length in (3, 90)]
    Path("wiki/test.jsonl").write_text("\n".join(lines), encoding="utf-8")
    options = ["--knn-datastore", "store", "--prompts", "wiki", "--split", "test"]
    with pytest.raises(ValueError, match="--methods has 'no', but there are only: baseline, "):
        main([*given, *options, "--methods", "no"])
    given[given.index("out")] = "named"
    assert main([*given, *options, "--methods", "as published, s"]) == 0
    for suite in read_results(Path("named"))["suites"].values():
        [entry] = suite["entries"]
        names = [sample["method"] for sample in entry["samples"]]
        assert names == ["baseline", "as published, s"]


def test_distractors_are_looked_at_but_not_found(byte_llama, tokenizer, tmp_path):
    build(byte_llama, tokenizer, 600, str(tmp_path / "store"))
    plain = KnnDatastore(tmp_path / "store")
    padded = knn_suite.PaddedKnnDatastore(plain.path, 900)
    assert len(padded) == len(padded.values) == 1500
    queries = list(plain.keys[::99] + np.float32(0.001))
    for one, other in zip(padded.search(queries, 3), plain.search(queries, 3), strict=True):
        assert one.ids.tolist() == other.ids.tolist()


def test_prompts_have_names_of_their_own(tokenizer):
    prompts = knn_suite.knn_prompts(knn_suite.library_files(), tokenizer)
    assert len({name for name, _ in prompts}) == len(prompts) == knn_suite.PROMPTS
    assert {len(ids) for _, ids in prompts} == {knn_suite.PROMPT_TOKENS}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "model", "--replay"], "run it without --replay"),
        ([], "was made for another tokenizer"),  # than the default model's
    ],
)
def test_what_cannot_be_measured_is_named_before_work_starts(
    given, byte_llama, tokenizer, arguments, message
):
    build(byte_llama, tokenizer, 1100, "store")
    with pytest.raises(ValueError, match=message):
        main(["knn", "--out", "out", "--knn-datastore", "store", "--device", "cpu", *arguments])
    assert not Path("out").exists()
