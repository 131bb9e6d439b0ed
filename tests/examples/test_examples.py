"""The examples run with the default model, and what trains with a tiny one; all but the first
in `scripts/test --nightly`."""

import os
import runpy
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from hf_refspec import default_model
from tests.helpers.snippets import masked

EXAMPLES = Path(__file__).parents[2] / "examples"
PRINTED = {
    "edit.py": "def compute(items, tax):",
    "rag.py": "the same: True",
    "chat_session.py": "> Name the primary colours, please.",
    "datastore.py": "the compact form is there as well",
    "pipeline_attach.py": "tokens in",
    "grpo.py": "the same weights: True",
    "langchain_retriever.py": "the same: True",
}
TRAINING = ["--steps", "1", "--rollouts", "2", "--tokens", "8", "--model"]


def test_each_example_is_tested():
    assert sorted(path.name for path in EXAMPLES.glob("*.py")) == sorted(PRINTED)


FIRST, *OTHERS = PRINTED


@pytest.mark.parametrize(
    "name", [FIRST, *(pytest.param(name, marks=pytest.mark.nightly) for name in OTHERS)]
)
def test_an_example_runs(name, model_folder, tmp_path, monkeypatch, capsys):
    if name == "langchain_retriever.py":
        pytest.importorskip("langchain_core")
    monkeypatch.chdir(tmp_path)
    arguments = [*TRAINING, str(model_folder)] if name == "grpo.py" else []
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert PRINTED[name] in capsys.readouterr().out


def printed(notebook: nbformat.NotebookNode) -> list[str]:
    """What the cells of a notebook have printed."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return [output.text for output in outputs if output.get("name") == "stdout"]


@pytest.mark.nightly
def test_the_notebook_prints_what_it_shows(tmp_path, monkeypatch):
    """HF_REFSPEC_WRITE_OUTPUTS=1 writes what it prints into it."""
    path = EXAMPLES / "quick_tour.ipynb"
    notebook = nbformat.read(path, as_version=4)
    shown = printed(notebook)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(EXAMPLES.parent), *sys.path]))
    client = NotebookClient(notebook, timeout=1800, kernel_name="python3", record_timing=False)
    client.execute(cwd=str(tmp_path))
    if os.environ.get("HF_REFSPEC_WRITE_OUTPUTS"):
        for cell in notebook.cells:  # warnings are this machine's
            if cell.cell_type == "code":
                cell.outputs = [each for each in cell.outputs if each.get("name") != "stderr"]
        notebook.metadata.language_info = {"name": "python"}
        nbformat.write(notebook, path)
    elif Path(default_model()).name == "SmolLM2-135M-Instruct":  # the Hub's words some things else
        assert [*map(masked, printed(notebook))] == [*map(masked, shown)]
