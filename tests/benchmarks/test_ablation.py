"""benchmarks/ablation.py measures both forms at several sizes, and writes what it has measured."""

from __future__ import annotations

import json

import ablation
import pytest
from ablation import COMPACT, CREST_NAME, MIXED, RANDOM, REST

from hf_refspec.store.datastore import Datastore


@pytest.fixture
def store(tmp_path, tokenizer) -> Datastore:
    texts = [f"def f{i}(width, height):\n    return width * height + {i}\n" * 3 for i in range(12)]
    return Datastore.build(texts, tokenizer, tmp_path / "store", progress=False, num_proc=1)


def test_writes_a_table_and_a_plot_of_both_forms(
    tmp_path, data, store, tokenizer, capsys, monkeypatch
):
    monkeypatch.setattr(ablation, "FRACTIONS", (1 / 2, 1))
    monkeypatch.setattr(ablation, "MEGABYTES", (0.006, 0.03))
    monkeypatch.setattr(ablation, "CREST", ((2, 20),))
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    out, problems = tmp_path / "out", data / "HumanEval.jsonl.gz"
    options = ["--tokenizer", str(tmp_path / "tokenizer"), "--out", str(out)]
    ablation.main([str(store.path), "--data", str(problems), *options])
    points = json.loads((out / "ablation.json").read_text())
    forms = [REST, MIXED] * 2 + [RANDOM, CREST_NAME] + [COMPACT] * 2
    assert [point["form"] for point in points] == forms
    rest, mixed, compact = (
        [point["size"] for point in points if point["form"] == form]
        for form in (REST, MIXED, COMPACT)
    )
    assert rest == mixed and 1.5 < rest[1] / rest[0] < 2.5
    assert compact[0] <= 6000 < compact[1] <= 30_000
    assert all(point["mat"] > 1.2 for point in points)
    assert (out / "ablation.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[-2] for line in printed[1:]] == [f"{p['mat']:.3f}" for p in points]
