"""`hf-refspec knn build`: what it prints and refuses."""

from __future__ import annotations

import re

import datasets
import pytest
from texts import some_texts

from hf_refspec.apps.cli.main import main
from hf_refspec.ralm.knn_datastore import KnnDatastore


@pytest.fixture(scope="module")
def places(tmp_path_factory, folder):
    """A model and texts."""
    root = tmp_path_factory.mktemp("knn")
    (root / "model").symlink_to(folder)
    texts = root / "texts"
    texts.mkdir()
    for number, text in enumerate(some_texts(9)):
        (texts / f"{number}.txt").write_text(text)
    (root / "empty").mkdir()
    return root


def run(*arguments) -> int:
    return main(["knn", *map(str, arguments)])


def test_build_prints_what_it_has_built(places, tmp_path, capsys):
    out = tmp_path / "store"
    assert run("build", places / "texts", "--model", places / "model", "--out", out) == 0
    assert f"  entries     {len(KnnDatastore(out)):,} of 32 numbers\n" in capsys.readouterr().out


def test_a_dataset_of_this_machine(places, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "rows").mkdir()
    datasets.Dataset.from_dict({"body": some_texts(9)}).to_json(tmp_path / "rows" / "train.json")
    options = ["--dataset", tmp_path / "rows", "--column", "body", "--model", places / "model"]
    assert run("build", *options, "--out", tmp_path / "store") == 0
    assert len(KnnDatastore(tmp_path / "store")) > 9


REFUSED = {
    "a folder without texts": (["{empty}", "--out", "{new}"], "has no file that matches"),
    "a folder that exists": (["{texts}", "--out", "{empty}"], "--out {empty} exists"),
    "a column of files": (
        ["{texts}", "--column", "x", "--out", "{new}"],
        "--column 'x' is for datasets",
    ),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED)
def test_bad_input_exits_with_2_and_one_line(arguments, message, places, offline, refused):
    def filled(text: str) -> str:
        return re.sub(r"\{(.+?)\}", lambda match: str(places / match[1]), text)

    given = [filled(argument) for argument in arguments]
    assert filled(message) in refused("knn", "build", *given, "--model", str(places / "model"))
    assert not (places / "new").exists()
