"""benchmarks/ablation.py measures both forms at several sizes."""

from __future__ import annotations

import ablation
import pytest
from ablation import BLEND, COMPACT, CREST_NAME, MIXED, REST

from hf_refspec.store.datastore import Datastore


@pytest.fixture
def store(tmp_path, tokenizer) -> Datastore:
    texts = [f"def f{i}(width, height):\n    return width * height + {i}\n" * 3 for i in range(12)]
    return Datastore.build(texts, tokenizer, tmp_path / "store", progress=False, num_proc=1)


def test_prints_mat_of_both_forms_at_each_size(
    tmp_path, data, store, tokenizer, capsys, monkeypatch
):
    monkeypatch.setattr(ablation, "FRACTIONS", (1 / 2, 1))
    monkeypatch.setattr(ablation, "MEGABYTES", (0.006, 0.03))
    monkeypatch.setattr(ablation, "CREST", ((2, 20),))
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    options = ["--tokenizer", str(tmp_path / "tokenizer")]
    ablation.main([str(store.path), "--data", str(data / "HumanEval.jsonl.gz"), *options])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    assert [row[0] for row in cells] == [REST, MIXED] * 2 + [BLEND, CREST_NAME] + [COMPACT] * 2
    rest, mixed, compact = (
        [float(row[2]) for row in cells if row[0] == form] for form in (REST, MIXED, COMPACT)
    )
    assert rest == mixed and 1.5 < rest[1] / rest[0] < 2.5
    assert compact[0] <= 0.006 < compact[1] <= 0.03
    assert all(float(row[3]) > 1.2 for row in cells)
