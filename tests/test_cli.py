"""`hf-refspec` from the command line."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import hf_refspec
from hf_refspec.cli import COMMANDS, main

# The package without its __init__, which wraps `generate` and so imports transformers.
BARE = """
import sys, types
package = types.ModuleType("hf_refspec")
package.__path__ = [sys.argv.pop(1)]
sys.modules["hf_refspec"] = package
from hf_refspec.cli import main
try:
    main()
finally:
    print([name for name in ("torch", "transformers", "numpy") if name in sys.modules])
"""


@pytest.fixture
def model_folder(tmp_path, byte_llama, tokenizer):
    folder = tmp_path / "model"
    byte_llama.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_generate_streams_text_and_prints_stats_to_stderr(tmp_path, model_folder, capsys):
    prompt, reference = tmp_path / "prompt.txt", tmp_path / "reference.txt"
    prompt.write_text("the cat sat on", encoding="utf-8")
    reference.write_text("the cat sat on the mat", encoding="utf-8")
    arguments = ["generate", "--model", model_folder, "--prompt-file", str(prompt)]
    assert main([*arguments, "--max-new-tokens", "12", "--max-draft-tokens", "0"]) == 0
    plain = capsys.readouterr()
    assert main([*arguments, "--max-new-tokens", "12", "--reference", str(reference)]) == 0
    drafted = capsys.readouterr()
    assert drafted.out == plain.out
    assert re.search(r"\d+ tokens in \d+ passes, MAT \d", drafted.err)
    assert " 0 drafted" in plain.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt-file", "missing.txt"], "missing.txt"),
        (["--reference", "missing.md"], "missing.md"),
        (["--model", "missing/model/folder"], "missing/model/folder"),
        (["--max-draft-tokens", "-1"], "max_draft_tokens"),
    ],
)
def test_bad_input_is_named_and_exits_with_2(tmp_path, model_folder, capsys, arguments, message):
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("the cat", encoding="utf-8")
    given = ["generate", "--model", model_folder, "--prompt-file", str(prompt), *arguments]
    assert main(given) == 2
    assert message in capsys.readouterr().err


def test_the_number_of_draft_tokens_is_a_number_or_auto(tmp_path, model_folder, capsys):
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("the cat sat on the cat sat", encoding="utf-8")
    given = ["generate", "--model", model_folder, "--prompt-file", str(prompt)]
    given += ["--max-new-tokens", "12", "--max-draft-tokens"]
    texts = []
    for number in ("auto", "8"):
        assert main([*given, number]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    with pytest.raises(SystemExit) as exit:
        main([*given, "many"])
    assert exit.value.code == 2
    assert "'many'" in capsys.readouterr().err


def test_demo_of_a_file_and_a_model_of_ones_own(tmp_path, model_folder, capsys):
    source = tmp_path / "area.py"
    source.write_text("def area(width, height):\n    return width * height\n" * 6, encoding="utf-8")
    arguments = ["demo", "--model", model_folder, "--file", str(source), "--max-new-tokens", "20"]
    assert main(arguments) == 0
    output = capsys.readouterr().out
    assert "area.py: complete it" in output
    assert "ids identical in" in output
    assert "\x1b[" not in output  # not a terminal


def test_demo_names_a_missing_file(capsys):
    assert main(["demo", "--file", "missing.py"]) == 2
    assert "missing.py" in capsys.readouterr().err


@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_help_and_version_wait_for_no_library(argument):
    package = str(Path(hf_refspec.__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", BARE, package, argument], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    printed = done.stdout.splitlines()
    assert printed[-1] == "[]"
    named = COMMANDS if argument == "--help" else [hf_refspec.__version__]
    assert all(name in done.stdout for name in named)


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_a_help_with_its_options(command, capsys):
    with pytest.raises(SystemExit) as exit:
        main([command, "--help"])
    assert exit.value.code == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert f"usage: hf-refspec {command}" in printed and COMMANDS[command][0] in printed


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["--nonsense", "info", "x"]])
def test_what_is_no_command_is_refused_with_the_usage(arguments, capsys):
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert exit.value.code == 2
    assert "usage: hf-refspec" in capsys.readouterr().err
