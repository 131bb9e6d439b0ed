"""`hf-refspec` from the command line."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import hf_refspec
from hf_refspec.apps.cli.main import COMMANDS, main

# The commands that load a model.
LOADING = ["bench", "chat", "demo", "evaluate", "generate", "ralm", "recycle", "serve", "space"]
LOADING += ["knn build"]
AND_LOADED = """
import sys
from hf_refspec.apps.cli.main import main
try:
    for line in sys.argv[1:]:
        main(line.split())
finally:
    print([name for name in ("torch", "transformers", "numpy") if name in sys.modules])
"""


def run(*lines: str, **options) -> subprocess.CompletedProcess[str]:
    """Runs command lines in a new process, which prints the libraries that it has loaded."""
    command = [sys.executable, "-c", AND_LOADED, *lines]
    return subprocess.run(command, capture_output=True, text=True, **options)


@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_help_and_version_wait_for_no_library(argument):
    done = run(argument)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
    named = COMMANDS if argument == "--help" else [hf_refspec.__version__]
    assert all(name in done.stdout for name in named)


def test_commands_about_datastores_do_not_wait_for_torch(tmp_path):
    build = "build texts --tokenizer ./missing --out store"
    done = run("info ./missing", "extend ./missing texts", build, cwd=tmp_path)
    assert "torch" not in done.stdout and "transformers" in done.stdout
    errors = done.stderr.splitlines()
    assert ["missing" in each and "does not exist" in each for each in errors] == [True] * 3


@pytest.mark.parametrize(
    ("line", "model"),
    [
        ("chat", "SmolLM2-135M-Instruct"),
        ("serve --port 0 --model=org/model", "org/model"),
        ("space --model org/model", "org/model"),
        ("demo", "SmolLM2-135M-Instruct"),
    ],
)
def test_a_command_that_loads_a_model_says_so_before_any_library(line, model, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("hf_refspec.apps.cli.main.import_module", interrupted)
    assert main(line.split()) == 130
    assert capsys.readouterr() == ("", f"Loading {model} ...\n")
    for other in (f"{line} --help", f"{line} --push user/name"):
        assert main(other.split()) == 130 and capsys.readouterr() == ("", "")


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_a_help_with_its_options(command, capsys):
    with pytest.raises(SystemExit) as exit:
        main([command, "--help"])
    assert exit.value.code == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert f"usage: hf-refspec {command}" in printed and COMMANDS[command][0] in printed


@pytest.mark.parametrize("command", COMMANDS)
def test_the_page_of_the_command_line_has_each_command(command):
    page = Path(__file__).parents[3] / "docs" / "tasks" / "command_line.md"
    table = [each for each in page.read_text(encoding="utf-8").splitlines() if each[:3] == "| `"]
    assert re.search(rf"[ `]{command}`", "\n".join(table))


@pytest.mark.parametrize("command", LOADING)
def test_commands_that_load_a_model_place_it(command, capsys):
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    printed = capsys.readouterr().out
    assert "--device-map" in printed and re.search("--device[, ]", printed)


def test_ctrl_c_while_libraries_are_loaded_ends_it_quietly(monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("hf_refspec.apps.cli.main.import_module", interrupted)
    assert main(["info", "x"]) == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("line", "command", "messages"),
    [
        ("", "", ["required: COMMAND"]),
        ("--nonsense info x", "", ["unrecognized arguments: --nonsense\n"]),
        ("generat x", "", ["'generat'", "did you mean 'generate'?"]),
        ("info x --nonsense", " info", ["unrecognized arguments: --nonsense\n"]),
        ("info x --verfy", " info", ["arguments: --verfy", "did you mean '--verify'?"]),
        ("build x --ouut=y", " build", ["required: --out", "no --ouut (did you mean '--out'?)"]),
        ("knn bulid", " knn", ["did you mean 'build'?"]),
        ("knn build x --out y z --modl m", " knn build", ["did you mean '--model'?"]),
        ("build --out x --preset wikpedia", " build", ["did you mean 'wikipedia'?"]),
    ],
)
def test_errors_have_their_commands_usage_and_what_may_be_meant(line, command, messages, capsys):
    with pytest.raises(SystemExit) as exit:
        main(line.split())
    assert exit.value.code == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"usage: hf-refspec{command} [-h]")
    assert all(message in printed for message in messages)


def test_a_pipe_that_its_reader_closes_ends_it_quietly(tmp_path):
    command = ["publish-generate", "owner/name", "--out", tmp_path / "new"]
    child = subprocess.Popen(
        [sys.executable, "-m", "hf_refspec", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    child.stdout.close()
    assert child.stderr.read() == b"" and child.wait() == 141
