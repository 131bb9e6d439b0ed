"""`hf-refspec recycle`: what it writes and prints."""

from __future__ import annotations

import pytest

import hf_refspec as rs
from hf_refspec.apps.cli.main import main


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory, byte_llama, tokenizer) -> str:
    folder = tmp_path_factory.mktemp("models") / "bytes"
    byte_llama.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("dtype", [[], ["--dtype", "bfloat16"]], ids=["as stored", "bfloat16"])
def test_it_writes_a_table_and_says_what_is_in_it(tmp_path, model_folder, dtype, tokenizer, capsys):
    (tmp_path / "a.txt").write_text("the cat sat on the mat, the cat sat on the hat")
    out = tmp_path / "table"
    arguments = [str(tmp_path / "a.txt"), "--model", model_folder, "--out", str(out)]
    assert main(["recycle", *arguments, "--license", "MIT", *dtype]) == 0
    drafter = rs.TokenRecycling.from_pretrained(out, tokenizer)
    printed = capsys.readouterr().out
    assert f"contexts    {len(drafter)} of up to 3 tokens, with 8 next tokens each" in printed
    assert "model       bytes, vocabulary 259" in printed


def test_it_refuses_what_it_cannot_do_before_the_model_is_loaded(tmp_path, capsys):
    out = ["--out", str(tmp_path / "table")]
    assert main(["recycle", *out, "--model", "no/model"]) == 2
    assert "give one of: files or folders, --dataset NAME" in capsys.readouterr().err
    there = ["--out", str(tmp_path)]
    assert main(["recycle", "a.txt", *there, "--model", "no/model"]) == 2
    assert "exists; choose another path" in capsys.readouterr().err
    nowhere = str(tmp_path / "missing")
    assert main(["recycle", nowhere, *out, "--model", "no/model"]) == 2
    assert f"{nowhere} is neither a file nor a folder" in capsys.readouterr().err
