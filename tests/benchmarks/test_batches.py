"""The benchmark of batches."""

from __future__ import annotations

import json

import batches


def test_each_category_has_a_row_with_the_speeds_and_the_ids_that_are_equal(
    tmp_path, tokenizer, byte_llama, capsys
):
    byte_llama.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    questions = [
        {"question_id": i, "category": category, "turns": [f"{category} question {i}"]}
        for i, category in enumerate(["writing", "qa", "writing", "qa", "qa"])
    ]
    data = "".join(f"{json.dumps(each)}\n" for each in questions)
    (tmp_path / "spec_bench_questions.jsonl").write_text(data)
    options = ["--rows", "2", "--dtypes", "float32", "--nodes", "auto", "3"]
    paths = ["--data", str(tmp_path), "--model", str(tmp_path)]
    batches.main([*paths, *options, "--max-new-tokens", "12"])
    table = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if "|" in line]
    writing, qa, every = table[2:]
    assert (writing[2], qa[2], every[2]) == ("writing", "qa", "**all**")
    for row in writing, qa:
        assert row[-1].startswith("2 of 2")
        assert all(float(mat) >= 1 for mat in row[5:7])
