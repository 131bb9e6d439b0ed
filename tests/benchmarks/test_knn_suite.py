"""The suite `knn`: both indexes, both k, greedy and sampled; bad input named."""

from __future__ import annotations

from pathlib import Path

import knn_suite
import pytest
from knn_suite import WITHOUT_PQ_INDEX
from retrieval_bench import main
from retrieval_settings import speculations

from hf_refspec.apps.bench.methods import transformers_methods
from hf_refspec.apps.bench.results import read_results
from hf_refspec.ralm.knn_datastore import KnnDatastore
from hf_refspec.store.build.presets import python_stdlib

MAIN = {*speculations(ablate=False), *(method.name for method in transformers_methods())}
ALL = {*MAIN, *speculations(ablate=True)}

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
    assert main([*given, "--knn-datastore", "store", "--limit", "1", "--ablate"]) == 0
    suites = read_results(Path("out"))["suites"]
    settings = [f"{index}, k={k}" for index in ("flat", "hnsw") for k in (1, 1024)]
    settings = [f"{name}, {kind}" for name in settings for kind in ("greedy", "sampled")]
    assert list(suites) == [f"knn, {name}, 1,500 to search, float32" for name in settings]
    for name, suite in suites.items():
        [entry] = suite["entries"]
        expected = ALL if "greedy" in name else MAIN
        if "flat" in name:
            expected = {*expected, WITHOUT_PQ_INDEX}
        assert {sample["method"] for sample in entry["samples"]} == expected
        assert {sample["tokens"] for sample in entry["samples"]} <= set(range(1, 9))
    assert "## knn, hnsw, k=1024, greedy, 1,500 to search" in capsys.readouterr().out


def test_prompts_have_names_of_their_own(tokenizer):
    prompts = knn_suite.knn_prompts(tokenizer)
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
