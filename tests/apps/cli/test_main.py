"""`hf-refspec` from the command line."""

from __future__ import annotations

import subprocess
import sys

import pytest

import hf_refspec
from hf_refspec.apps.cli.main import COMMANDS, main
from hf_refspec.store.datastore import Datastore

AND_LOADED = """
import sys
from hf_refspec.apps.cli.main import main
try:
    main()
finally:
    print([name for name in ("torch", "transformers", "numpy") if name in sys.modules])
"""


@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_help_and_version_wait_for_no_library(argument):
    done = subprocess.run(
        [sys.executable, "-c", AND_LOADED, argument], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    printed = done.stdout.splitlines()
    assert printed[-1] == "[]"
    named = COMMANDS if argument == "--help" else [hf_refspec.__version__]
    assert all(name in done.stdout for name in named)


@pytest.mark.parametrize(
    "arguments",
    [
        ["info", "./missing"],
        ["extend", "./missing", "texts"],
        ["build", "texts", "--tokenizer", "./missing", "--out", "store"],
    ],
)
def test_commands_about_datastores_do_not_wait_for_torch(arguments, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", AND_LOADED, *arguments],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert "torch" not in done.stdout and "transformers" in done.stdout
    assert "missing" in done.stderr and "does not exist" in done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_a_help_with_its_options(command, capsys):
    with pytest.raises(SystemExit) as exit:
        main([command, "--help"])
    assert exit.value.code == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert f"usage: hf-refspec {command}" in printed and COMMANDS[command][0] in printed


def test_ctrl_c_while_libraries_are_loaded_ends_it_quietly(monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("hf_refspec.apps.cli.main.import_module", interrupted)
    assert main(["info", "x"]) == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["--nonsense", "info", "x"]])
def test_what_is_no_command_is_refused_with_the_usage(arguments, capsys):
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert exit.value.code == 2
    assert "usage: hf-refspec" in capsys.readouterr().err


def test_a_pipe_that_its_reader_closes_ends_it_quietly(tmp_path, tokenizer):
    Datastore.build(["a text"], tokenizer, tmp_path / "store", progress=False)
    child = subprocess.Popen(
        [sys.executable, "-m", "hf_refspec", "info", tmp_path / "store"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    child.stdout.close()
    assert child.stderr.read() == b"" and child.wait() == 141
