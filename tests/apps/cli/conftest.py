import io
import re
import shutil
from pathlib import Path

import datasets
import huggingface_hub
import pytest

from hf_refspec.apps.cli.main import main
from tests.helpers.architectures import small
from tests.helpers.heads import block_drafter, with_mtp
from tests.helpers.texts import some_texts


@pytest.fixture(scope="session")
def folder(model_folder) -> str:
    """The folder of a model, with a tokenizer and a chat template."""
    return str(model_folder)


@pytest.fixture(scope="session")
def templateless(tmp_path_factory, folder) -> str:
    """The same without the chat template."""
    path = tmp_path_factory.mktemp("models") / "templateless"
    shutil.copytree(folder, path)
    Path(path, "chat_template.jinja").unlink()
    return str(path)


@pytest.fixture(scope="session")
def mtp_folder(tmp_path_factory, tokenizer) -> str:
    """The folder of a model with a layer for multi-token prediction."""
    path = tmp_path_factory.mktemp("models") / "bailing"
    with_mtp(small("bailing_hybrid", vocab_size=len(tokenizer)), 1, path)
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="session")
def drafter_folder(tmp_path_factory, byte_llama) -> str:
    """The folder of a block drafter for the model of `folder`."""
    path = tmp_path_factory.mktemp("models") / "drafter"
    block_drafter(byte_llama).save_pretrained(path)
    return str(path)


@pytest.fixture
def offline(monkeypatch):
    """What is nowhere is looked for on the Hub, which must not be waited for."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.fixture
def stdin(monkeypatch):
    """Puts bytes, or a text, into the standard input."""

    def put(content):
        content = content if isinstance(content, bytes) else content.encode()
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content), "utf-8"))

    return put


@pytest.fixture
def rows(tmp_path, monkeypatch) -> Path:
    """A dataset of this machine, with the columns `title` and `body`."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "rows").mkdir()
    texts = {"title": [*"abcdefghi"], "body": some_texts(9)}
    datasets.Dataset.from_dict(texts).to_json(tmp_path / "rows" / "train.json")
    return tmp_path / "rows"


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
