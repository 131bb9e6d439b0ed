"""`hf-refspec demo` from the command line."""

from __future__ import annotations

import pytest

from hf_refspec.apps.cli.main import main


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
def test_a_file_that_cannot_be_shown_is_named(folder, tmp_path, refused, content):
    file = tmp_path / "area.py"
    if content is not None:
        file.write_bytes(content)
    assert f"--file {file}" in refused("demo", "--model", folder, "--file", file)


def test_what_cannot_be_shown_or_written_is_refused_first(folder, templateless, refused):
    assert "no chat template; choose a --model" in refused("demo", "--model", templateless)
    message = refused("demo", "--model", folder, "--svg", "nowhere/demo.svg")
    assert "--svg nowhere/demo.svg cannot be written" in message
