"""LLMA's MAT on retrieval-augmented prompts, and by match and copy length."""

from __future__ import annotations

import pytest
import replay_mat


@pytest.fixture
def arguments(data, tokenizer, tmp_path) -> list[str]:
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    return [str(data / "llma_rag.jsonl"), "--tokenizer", str(tmp_path / "tokenizer")]


def test_all_contenders_have_triggers_accepted_tokens_and_steps(arguments, capsys):
    replay_mat.main(arguments)
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split()[2:6] == ["MAT", "triggers", "accepted", "steps"]
    assert len(rows) == len(replay_mat.CONTENDERS)
    [llma] = [row for row in rows if row.startswith("LLMA")]
    mat, triggers, accepted, steps = map(float, llma.split()[4:8])
    assert mat > 1 and 0 < triggers < steps < accepted


def test_the_grid_has_a_row_for_each_match_length(arguments, capsys, monkeypatch):
    monkeypatch.setattr(replay_mat, "MATCH_LENGTHS", (1, 3))
    monkeypatch.setattr(replay_mat, "COPY_LENGTHS", (2, 8))
    replay_mat.main([*arguments, "--grid"])
    header, *rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert header[-2:] == ["2", "8"] and [row[0] for row in rows] == ["1", "3"]
    mats = [list(map(float, row[1:])) for row in rows]
    assert mats[0][1] > mats[0][0] > 1 and mats[0][1] >= mats[1][1]
