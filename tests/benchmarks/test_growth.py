"""The growth benchmark: a row for each step, and a huge datastore in no room."""

from __future__ import annotations

import re

import growth

from hf_refspec.store.build.presets import python_stdlib


def test_each_step_has_a_row(tmp_path, monkeypatch, tokenizer, capsys):
    """In this process: a new one for each step would load torch."""
    monkeypatch.setattr(growth, "run", growth._timed)
    monkeypatch.setattr(growth, "CONTEXTS", 20)
    monkeypatch.setattr(growth, "PARTS", (0.5, 0.0, 1.0))
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "texts").mkdir()
    for i, file in enumerate(python_stdlib()[:8]):
        (tmp_path / "texts" / f"{i}.py").write_bytes(file.read_bytes()[:3000])
    arguments = [str(tmp_path / "texts"), "--tokenizer", str(tmp_path / "tokenizer")]
    assert growth.main([*arguments, "--num-proc", "1"]) == 0
    table, cold, costs = capsys.readouterr().out.split("\n\n")
    _, _, *rows = (line.split(" | ") for line in table.splitlines())
    steps = ["build", "extend", "extend", "merge", "compact"]
    assert [row[0].strip("| ") for row in rows] == steps
    tokens = [int(row[1].replace(",", "")) for row in rows]
    assert 0 < tokens[0] < tokens[1] < tokens[2] == tokens[3]
    assert int(rows[3][2]) == 1
    assert all(re.search(r"\d+ µs \(\d+\) \|$", row[-1]) for row in rows)
    assert re.match(r"Cold: a draft takes [\d.]+ ms", cold)
    assert re.search(r"[\d.]+ µs to tokenise,\n[\d.]+ µs to sort", costs)


def test_a_huge_datastore_is_simulated(monkeypatch, capsys):
    monkeypatch.setattr(growth, "LARGEST_SHARD", 20_000_000)
    assert growth.main(["--simulate", "90000000"]) == 0
    shown = capsys.readouterr().out
    assert "90,000,000 in 5 shards, 0.00 TB" in shown
    assert float(re.search(r"on this disk +([\d.]+) MB", shown)[1]) < 10
