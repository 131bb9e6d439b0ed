"""The benchmark of batches."""

from __future__ import annotations

import json

import batches


def test_each_category_has_its_speeds_and_all_together_a_table(model, tmp_path, capsys):
    questions = [
        {"question_id": i, "category": category, "turns": [f"{category} question {i}"]}
        for i, category in enumerate(["writing", "qa", "writing", "qa", "qa"])
    ]
    data = "".join(f"{json.dumps(each)}\n" for each in questions)
    (tmp_path / "spec_bench_questions.jsonl").write_text(data)
    options = ["--data", ".", "--rows", "2", "--nodes", "auto", "3", "--max-new-tokens", "12"]
    assert batches.main([*model, *options]) == 0
    printed = capsys.readouterr().out
    for category in ("writing", "qa"):
        assert f"2 rows, {category}: plain 1.00x, auto draft tokens " in printed
    assert printed.count("2 of 2") == 3
