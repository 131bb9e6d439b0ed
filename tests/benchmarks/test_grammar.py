"""The benchmark of grammars, with a model of bytes."""

from __future__ import annotations

import grammar
import pytest


def test_every_method_has_a_row(tmp_path, tokenizer, byte_llama, capsys):
    pytest.importorskip("llguidance", reason="the extra `grammar` is not installed")
    byte_llama.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    chosen = ["--schemas", "enums", "tools", "--dtype", "float32", "--limit", "1", "--nodes", "8"]
    assert grammar.main(["--model", str(tmp_path), *chosen, "--max-new-tokens", "40"]) == 0
    printed = capsys.readouterr().out
    rows = [line.split(" | ") for line in printed.splitlines() if line.startswith("| ")][2:]
    assert [row[1] for row in rows] == 2 * [
        grammar.PLAIN,
        grammar.LOOKUP,
        grammar.DEFAULT,
        grammar.GRAMMAR,
    ]
    assert {row[4].strip(" |") for row in rows} == {"1 of 1"}


def test_texts_are_the_same_in_every_run():
    assert all(grammar.texts(name) == grammar.texts(name) for name in [*grammar.SCHEMAS, "tools"])
    assert len(set(grammar.texts("nested"))) == grammar.TEXTS
