"""`hf-refspec demo` from the command line."""

from __future__ import annotations

import pytest

from hf_refspec.apps.cli.main import main


@pytest.fixture
def folder(tmp_path, byte_llama, tokenizer) -> str:
    byte_llama.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def test_a_model_and_a_file_of_ones_own(folder, tmp_path, capsys):
    file = tmp_path / "area.py"
    file.write_text("def area(width, height):\n    return width * height\n", encoding="utf-8")
    picture = tmp_path / "demo.svg"
    arguments = ["--model", folder, "--file", str(file), "--max-new-tokens", "20"]
    assert main(["demo", *arguments, "--svg", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert "An edit of area.py" in printed and "2 of 2" in printed
    assert "\x1b[" not in printed  # not a terminal
    drawn = picture.read_text(encoding="utf-8")
    assert drawn.startswith("<svg") and "area.py" in drawn and "ReferenceCopy" in drawn


@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe\x00"])
def test_a_file_that_cannot_be_shown_is_named(folder, tmp_path, capsys, content):
    file = tmp_path / "area.py"
    if content is not None:
        file.write_bytes(content)
    assert main(["demo", "--model", folder, "--file", str(file)]) == 2
    assert f"--file {file}" in capsys.readouterr().err


def test_a_model_without_a_chat_template_is_refused(folder, tmp_path, capsys):
    (tmp_path / "model" / "chat_template.jinja").unlink()
    assert main(["demo", "--model", folder]) == 2
    assert "no chat template; choose a --model with one" in capsys.readouterr().err


def test_a_picture_that_cannot_be_written_is_refused_before_anything_is_shown(folder, capsys):
    assert main(["demo", "--model", folder, "--svg", "nowhere/demo.svg"]) == 2
    output, error = capsys.readouterr()
    assert output == "" and "--svg nowhere/demo.svg cannot be written" in error
