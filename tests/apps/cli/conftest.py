from __future__ import annotations

import re
import shutil
from pathlib import Path

import huggingface_hub
import pytest

from hf_refspec.apps.cli.main import main


@pytest.fixture(scope="session")
def folder(tmp_path_factory, byte_llama, tokenizer) -> str:
    """The folder of a model, with a tokenizer and a chat template."""
    path = tmp_path_factory.mktemp("models") / "bytes"
    byte_llama.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="session")
def templateless(tmp_path_factory, folder) -> str:
    """The same without the chat template."""
    path = tmp_path_factory.mktemp("models") / "templateless"
    shutil.copytree(folder, path)
    Path(path, "chat_template.jinja").unlink()
    return str(path)


@pytest.fixture
def offline(monkeypatch):
    """What is nowhere is looked for on the Hub, which must not be waited for."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.fixture
def printed(capsys):
    """Runs a command, which must end with a status; returns its standard output."""

    def run(*arguments, status: int = 0) -> str:
        capsys.readouterr()
        assert main([*map(str, arguments)]) == status
        return capsys.readouterr().out

    return run


@pytest.fixture
def refused(capsys):
    """Runs a command, which must refuse its input; returns the one line that it prints."""

    def run(*arguments) -> str:
        capsys.readouterr()
        assert main([*map(str, arguments)]) == 2
        error = re.sub(r"^Loading .*\n", "", capsys.readouterr().err)
        assert error.startswith("hf-refspec: ") and error.count("\n") == 1, error
        return error

    return run
