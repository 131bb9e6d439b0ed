"""The examples run, with the default model where its name on the Hub is cached."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import nbformat
import pytest
from huggingface_hub import constants
from nbclient import NotebookClient

from hf_refspec.smollm2 import HUB_ID, default_model

EXAMPLES = Path(__file__).parents[2] / "examples"
PRINTED = {
    "rag.py": "the same: True",
    "edit.py": "def compute(items, tax):",
    "chat_session.py": "> Name the primary colours, please.",
    "datastore.py": "the compact form is there as well",
    "pipeline_attach.py": "tokens in",
}


@pytest.fixture
def cached(tmp_path, monkeypatch) -> Path:
    """A folder for HF_HOME whose cache has the default model under its name on the Hub."""
    repo = tmp_path / "hub" / f"models--{HUB_ID.replace('/', '--')}"
    (repo / "snapshots").mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)
    (repo / "snapshots" / ("0" * 40)).symlink_to(default_model())
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_each_example_is_tested():
    assert sorted(path.name for path in EXAMPLES.glob("*.py")) == sorted(PRINTED)


@pytest.mark.parametrize("name", PRINTED)
def test_an_example_runs(name, cached, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert PRINTED[name] in capsys.readouterr().out


def printed(notebook: nbformat.NotebookNode) -> list[str]:
    """What the cells of a notebook have printed."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return [output.text for output in outputs if output.get("name") == "stdout"]


def test_the_notebook_prints_what_it_shows(cached, monkeypatch):
    """HF_REFSPEC_WRITE_OUTPUTS=1 writes what it prints into it."""
    path = EXAMPLES / "quick_tour.ipynb"
    notebook = nbformat.read(path, as_version=4)
    shown = printed(notebook)
    monkeypatch.setenv("HF_HOME", str(cached))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(EXAMPLES.parent), *sys.path]))
    client = NotebookClient(notebook, timeout=300, kernel_name="python3", record_timing=False)
    client.execute(cwd=str(cached))
    if os.environ.get("HF_REFSPEC_WRITE_OUTPUTS"):
        for cell in notebook.cells:  # warnings are this machine's
            if cell.cell_type == "code":
                cell.outputs = [each for each in cell.outputs if each.get("name") != "stderr"]
        notebook.metadata.language_info = {"name": "python"}
        nbformat.write(notebook, path)
    elif Path(default_model()).name == "SmolLM2-135M-Instruct":  # the Hub's words some things else
        assert printed(notebook) == shown
