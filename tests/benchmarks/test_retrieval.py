"""Speculative retrieval is measured with all retrievers and both indexes, against the baseline."""

from __future__ import annotations

import json
from pathlib import Path

import huggingface_hub
import pytest
import retrieval
from encoders import letters, load_letters
from retrieval import BASELINE, BATCHES, OURS, PUBLISHED, main, speculations

from hf_refspec.ralm.knn_datastore import KnnDatastore
from hf_refspec.retrieval.knowledge_base import KnowledgeBase
from hf_refspec.store.build.presets import python_stdlib

TEXTS = [f"{name} is a {kind} cat." for name in ("Tom", "Kit", "Al") for kind in ("small", "big")]
ENCODER = ["--encoder", "letters-64"]


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """Names that exist nowhere are looked up on the Hub: the test must not wait for it."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("retrieval.load_encoder", load_letters)


@pytest.fixture
def base(model, tokenizer) -> str:
    KnowledgeBase.build(TEXTS, tokenizer, letters(64), "base", progress=False)
    return "base"


@pytest.fixture
def store(model, byte_llama, tokenizer) -> str:
    texts = (file.read_text(encoding="utf-8") for file in python_stdlib()[1:10])
    KnnDatastore.build(byte_llama, tokenizer, texts, "knn", max_entries=600, progress=False)
    return "knn"


@pytest.fixture
def tables(printed_rows):
    """The cells of each table that was printed since the last call, by its first heading."""

    def found() -> dict[str, list[list[str]]]:
        by_heading: dict[str, list[list[str]]] = {}
        for cells in printed_rows():
            if cells[1] in ("searches", "1"):
                rows = by_heading.setdefault(cells[0], [])
            else:
                rows.append(cells)
        return by_heading

    return found


def test_every_retriever_answers_recorded_and_free_questions(model, base, data, tables):
    options = [*ENCODER, "--distractors", "50", "--limit", "2", "--max-new-tokens", "9"]
    forced = ["--prompts", str(data / "llma_rag.jsonl"), "--forced", "--ablate"]
    free = ["--prompts", str(data / "spec_bench_questions.jsonl"), "--drafts"]
    for given, names in ((forced, speculations(True, "psa")), (free, [BASELINE, PUBLISHED, OURS])):
        assert main(["ralm", base, *model, *options, *given]) == 0
        printed = tables()
        assert list(printed) == ["flat, 56", "hnsw, 6", "bm25, 6"]
        for rows in printed.values():
            assert [row[0] for row in rows] == list(names)
            assert float(rows[0][1]) > 1 and rows[0][-1] == "1.00x"


def test_both_indexes_continue_texts_greedily_and_sampled(model, store, tables):
    Path("texts.jsonl").write_text(json.dumps({"text": "a = b " * 90}))
    options = ["--prompts", "texts.jsonl", "--max-new-tokens", "6", "--distractors", "100"]
    assert main(["knn", store, *model, *options, "--limit", "1"]) == 0
    printed = tables()
    assert len(printed) == 8 and "flat, 700, k=1, greedy" in printed
    assert "hnsw, 600, k=1024, sampled" in printed


def test_a_search_is_timed_for_each_number_of_queries(model, base, tables):
    assert main(["latency", base, *model, *ENCODER, "--distractors", "60"]) == 0
    [rows] = tables().values()
    assert [row[0] for row in rows] == ["flat, 66", "hnsw, 6", "bm25, 6"]
    assert all(len(row) == 1 + len(BATCHES) for row in rows)


def test_other_passages_than_the_baselines_end_it(model, base, data, monkeypatch):
    def other(self, inputs, **options):
        call = asked(self, inputs, **options)
        self.methods[OURS]["retrieval_stats"].best_ids[-1] += 1
        return call

    asked = retrieval.Comparison.ask
    monkeypatch.setattr(retrieval.Comparison, "ask", other)
    options = ["--prompts", str(data / "llma_rag.jsonl"), "--forced", "--limit", "1"]
    with pytest.raises(SystemExit, match="ours, psa retrieved other passages"):
        main(["ralm", base, *model, *options])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no/base"], "no/base"),
        (["base", "--distractors", "5"], "needs --encoder"),
    ],
)
def test_what_does_not_fit_is_named(model, base, data, arguments, message):
    prompts = ["--prompts", str(data / "spec_bench_questions.jsonl")]
    with pytest.raises((OSError, ValueError), match=message):
        main(["ralm", *arguments, *model, *prompts])
