"""The benchmark of rollouts."""

from __future__ import annotations

import pytest
import rollouts


def test_each_epoch_has_a_row_whose_fractions_are_of_all_tokens(
    tmp_path, tokenizer, byte_llama, capsys
):
    byte_llama.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    options = ["--steps", "9", "--rollouts", "2", "--max-new-tokens", "12", "--temperature", "0.3"]
    assert rollouts.main(["--model", str(tmp_path), *options]) == 0
    first, second = capsys.readouterr().out.strip().splitlines()[-2:]
    assert first.startswith("| 1-8 |")
    assert second.startswith("| 9-9 |")
    mat, *sources = (float(cell.strip(" %")) for cell in first.split("|")[2:7])
    assert sum(sources) == pytest.approx(100 * (1 - 1 / mat), abs=3)
