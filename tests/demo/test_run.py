"""The demo runs the bundled model on files that it has not been trained on."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from hf_refspec.cli import main
from hf_refspec.demo import corpus, run
from hf_refspec.demo.default_model import DEFAULT_MODEL, load_model, load_tokenizer
from hf_refspec.demo.run import Demo, heldout_tasks
from hf_refspec.generation.speculate import speculate


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer()


def test_the_bundled_model_is_small(tokenizer):
    size = sum(path.stat().st_size for path in Path(DEFAULT_MODEL).iterdir())
    assert size <= 25e6
    assert 4_000 <= len(tokenizer) <= 8_192


def test_its_tokenizer_gives_back_every_text(tokenizer):
    texts = [corpus.read_source(path) for path in corpus.heldout_files()[:5]]
    for text in [*texts, "\t é 中文 🙂\r\n\f  x\n\n\n    y = 'ß'"]:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids) == text


def test_the_bundled_model_has_learned_python(tokenizer):
    """Far better than chance (8.3 nats a token) on a file that it has not seen."""
    model = load_model(device="cpu")
    ids = tokenizer(corpus.read_source(corpus.heldout_files()[3]), return_tensors="pt").input_ids
    with torch.no_grad():
        loss = model(ids[:, :1024], labels=ids[:, :1024]).loss
    assert loss < 3.5


@pytest.mark.parametrize("color", [True, False])
def test_ids_are_identical_and_copied_tokens_are_coloured(tokenizer, capsys, monkeypatch, color):
    # A fixed number of nodes: how many pay would depend on the machine.
    monkeypatch.setattr(run, "speculate", functools.partial(speculate, max_draft_tokens=16))
    model = load_model(device="cpu")
    tasks = heldout_tasks(tokenizer)
    assert [task.title.split(": ")[1].split()[0] for task in tasks] == ["rename"] * 3 + ["complete"]
    demo = Demo(model, tokenizer, max_new_tokens=24, color=color)
    assert demo.run(tasks)
    output = capsys.readouterr().out
    assert ("\x1b[32m" in output) == color
    assert "ids identical in 4 of 4" in output
    for comparison in demo.comparisons:
        steps = sum(length for length, _ in comparison.drafter.runs())
        assert steps == comparison.new_tokens


def test_it_drafts_from_a_datastore_as_well_if_asked(tmp_path, capsys, monkeypatch):
    files = corpus.training_files()[:4]
    monkeypatch.setattr(corpus, "training_files", lambda: files)
    source = tmp_path / "area.py"
    source.write_text("def area(width, height):\n    return width * height\n", encoding="utf-8")
    arguments = ["demo", "--file", str(source), "--max-new-tokens", "12", "--no-color"]
    assert main([*arguments, "--datastore"]) == 0
    output = capsys.readouterr().out
    assert "with ReferenceCopy() | DatastoreDrafts(store) " in output
    assert "area.py: complete it" in output
    assert "ids identical in 1 of 1" in output
