"""`hf-refspec store recycle`: what it writes and prints."""

from __future__ import annotations

import pytest

import hf_refspec as rs
from hf_refspec.apps.cli.main import main


@pytest.mark.parametrize("dtype", [[], ["--dtype", "bfloat16"]], ids=["as stored", "bfloat16"])
def test_it_writes_a_table_and_says_what_is_in_it(tmp_path, folder, dtype, tokenizer, capsys):
    (tmp_path / "a.txt").write_text("the cat sat on the mat, the cat sat on the hat")
    out = tmp_path / "table"
    arguments = [str(tmp_path / "a.txt"), "--model", folder, "--out", str(out)]
    assert main(["store", "recycle", *arguments, "--license", "MIT", *dtype]) == 0
    drafter = rs.TokenRecycling.from_pretrained(out, tokenizer)
    printed = capsys.readouterr().out
    assert f"contexts    {len(drafter)} of up to 3 tokens, with 8 next tokens each" in printed
    assert "model       bytes, vocabulary 259" in printed


def test_it_refuses_what_it_cannot_do_before_the_model_is_loaded(tmp_path, refused):
    arguments = ["store", "recycle", "--model", "no/model", "--out"]
    new, missing = tmp_path / "table", tmp_path / "missing"
    assert "give one of: files or folders, --dataset NAME" in refused(*arguments, new)
    assert "exists; choose another path" in refused(*arguments, tmp_path, "a.txt")
    assert f"{missing} is neither a file nor a folder" in refused(*arguments, new, missing)
