"""The time of a batched search, for each retriever."""

from __future__ import annotations

from batch_latency import BATCHES, main
from encoders import letters, load_letters

from hf_refspec.retrieval.knowledge_base import KnowledgeBase


def test_prints_a_row_for_each_retriever(tmp_path, tokenizer, monkeypatch, capsys):
    monkeypatch.setattr("ralm_suite.load_encoder", load_letters)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    texts = [f"cat number {i} is a cat" for i in range(40)]
    KnowledgeBase.build(texts, tokenizer, letters(8), tmp_path / "base", progress=False)
    arguments = ["--knowledge-base", str(tmp_path / "base"), "--encoder", "letters-8"]
    assert main([*arguments, "--model", str(tmp_path / "tokenizer"), "--distractors", "60"]) == 0
    header, _, *rows = capsys.readouterr().out.strip().splitlines()
    assert header == f"| ms, queries: | {' | '.join(map(str, BATCHES))} |"
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert [row[0] for row in cells] == ["flat, 100", "hnsw, 40", "bm25, 40"]
    assert all(float(each) >= 0 for row in cells for each in row[1:])
