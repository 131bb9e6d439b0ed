import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants

from hf_refspec.smollm2 import PACKAGE
from tests.helpers.tiny_package import GGUF_FILE, default_model, write_gguf


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / GGUF_FILE
    write_gguf(path)
    return path


@pytest.fixture
def package(tmp_path, tiny_gguf) -> Path:
    """The folder of an installed package that is called as the real one and holds the tiny model;
    importing it fails, as the real one's does without llama.cpp."""
    site = tmp_path / "site"
    folder = site / PACKAGE.replace("-", "_")
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise ImportError('llama_cpp')\n")
    shutil.copy(tiny_gguf, folder)
    about = site / f"{folder.name}-9.9.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: 9.9\n")
    return folder


@pytest.fixture
def home(tmp_path, monkeypatch, package) -> Path:
    """An empty HF_HOME, no Hub, and the tiny model's package in place of the real one."""
    home = tmp_path / "home"
    monkeypatch.setattr(constants, "HF_HOME", str(home))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.syspath_prepend(package.parent)
    return home


@pytest.fixture
def converted(home) -> Path:
    return Path(default_model())
