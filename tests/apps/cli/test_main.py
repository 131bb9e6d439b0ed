"""`hf-refspec` from the command line."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import hf_refspec
from hf_refspec.apps.cli.main import COMMANDS, GROUPS, main

# The commands that load a model.
LOADING = ["bench", "chat", "check", "demo", "generate", "serve", "space", "store evaluate"]
STORE = [f"store {name}" for name in COMMANDS["store"][1]]
DEFAULTS = {
    "bench": "of an answer (default: 256)",
    "generate": "auto: those that pay (default: auto)",
    "serve": "that one request is decoded (default: 600)",
    "store build": "the dataset's split (default: train)",
}
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
    named = [*COMMANDS, *GROUPS] if argument == "--help" else [hf_refspec.__version__]
    assert all(name in done.stdout for name in named)


def test_without_a_command_it_prints_its_help(capsys):
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert len(COMMANDS) <= 12 and all(f"\n  {name} " in printed for name in COMMANDS)
    assert main(["store"]) == 0
    assert "usage: hf-refspec store" in (printed := capsys.readouterr().out)
    assert all(f"\n    {name.removeprefix('store ')}" in printed for name in STORE)


def test_commands_about_datastores_do_not_wait_for_torch(tmp_path):
    (tmp_path / "texts").mkdir()
    build = "store build texts --tokenizer ./missing --out store"
    done = run("store info ./missing", build, cwd=tmp_path)
    assert "torch" not in done.stdout and "transformers" in done.stdout
    errors = done.stderr.splitlines()
    assert len(errors) == 2 and all("missing" in e and "does not exist" in e for e in errors)


@pytest.mark.parametrize(
    ("line", "printed"),
    [
        ("chat", "Loading ...\n"),
        ("serve --port 0 --model=org/model", "Loading ...\n"),
        ("store evaluate x y", "Loading ...\n"),
        ("chat --help", ""),
        ("space --push user/name", ""),
        ("store info x", ""),
    ],
)
def test_a_command_says_that_it_loads_and_ctrl_c_ends_it_quietly_meanwhile(
    line, printed, monkeypatch, capsys
):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("hf_refspec.apps.cli.main.import_module", interrupted)
    assert main(line.split()) == 130
    assert capsys.readouterr() == ("", printed)


@pytest.mark.parametrize("command", [*COMMANDS, *STORE])
def test_each_command_has_a_help_with_its_options_and_is_on_the_page(command, capsys):
    with pytest.raises(SystemExit) as exit:
        main([*command.split(), "--help"])
    assert exit.value.code == 0
    help = capsys.readouterr().out
    assert not re.search(r"^  --\S+( \S+)?\n(?! {8})", help, re.M), "an option has no help"
    printed = " ".join(help.split())
    assert DEFAULTS.get(command, "") in printed
    assert f"usage: hf-refspec {command}" in printed and about(command) in printed
    if command in LOADING:  # it places the model
        assert "--device-map" in printed and re.search("--device[, ]", printed)
    page = Path(__file__).parents[3] / "docs" / "tasks" / "command_line.md"
    table = [each for each in page.read_text(encoding="utf-8").splitlines() if each[:3] == "| `"]
    assert re.search(rf"[ `]{command.split()[-1]}`", "\n".join(table))


def about(command: str) -> str:
    found, commands = "", COMMANDS
    for name in command.split():
        found, commands = commands[name]
    return found


@pytest.mark.parametrize(
    ("line", "command", "messages"),
    [
        ("--nonsense store info x", "", ["unrecognized arguments: --nonsense\n"]),
        ("generat --help", "", ["invalid choice: 'generat' "]),
        ("store info x --nonsense", "", ["unrecognized arguments: --nonsense\n"]),
        ("store serch x", " store", ["invalid choice: 'serch' "]),
        (
            "generate --max-draft-tokens 1025",
            " generate",
            ["`max_draft_tokens` must be at most 1024, but is 1025"],
        ),
        ("publish z --modl m", "", ["unrecognized arguments: --modl m\n"]),
    ],
)
def test_errors_have_their_commands_usage(line, command, messages, capsys):
    with pytest.raises(SystemExit) as exit:
        main(line.split())
    assert exit.value.code == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"usage: hf-refspec{command} ")
    assert all(message in printed for message in messages)


def test_a_pipe_that_its_reader_closes_ends_it_quietly(tmp_path):
    command = ["publish", "owner/name", "--package", "hf_refspec", "--out", tmp_path / "new"]
    child = subprocess.Popen(
        [sys.executable, "-m", "hf_refspec", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    child.stdout.close()
    assert child.stderr.read() == b"" and child.wait() == 141
