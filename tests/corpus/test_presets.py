"""Corpora with a name."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

import datasets
import pytest

from hf_refspec.apps.cli.main import main
from hf_refspec.corpus import documents
from hf_refspec.corpus.documents import PRESETS, python_stdlib
from hf_refspec.store.datastore import Datastore


def test_the_standard_library_is_found_whole():
    files = python_stdlib()
    root = Path(sysconfig.get_path("stdlib"))
    names = {file.relative_to(root).as_posix() for file in files}
    assert {"os.py", "json/decoder.py", "asyncio/events.py"} <= names
    assert len(files) == len(set(files)) > 400
    assert files == sorted(files)
    assert all(file.is_file() and file.suffix == ".py" for file in files)


def test_installed_packages_are_no_part_of_it(tmp_path, monkeypatch):
    ours = ["os.py", "json/decoder.py", "test/test_os.py"]
    theirs = ["site-packages/a.py", "dist-packages/b/c.py", "x/site-packages/d.py", "lib.so"]
    for name in (*ours, *theirs):
        path = tmp_path / "site-packages" / "python" / name  # its own place does not count
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    root = tmp_path / "site-packages" / "python"
    monkeypatch.setattr(documents.sysconfig, "get_path", lambda name: {"stdlib": str(root)}[name])
    assert [file.relative_to(root).as_posix() for file in python_stdlib()] == sorted(ours)


def test_a_preset_reads_a_copy_of_its_dataset(tmp_path, tokenizer, capfd):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    copy = tmp_path / "copy" / PRESETS["sharegpt"].options["data_files"]
    copy.parent.mkdir()
    chat = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]
    copy.write_text(json.dumps([{"id": "a_0", "conversations": chat}]))
    options = ["--dataset", copy.parent, "--tokenizer", tmp_path / "tokenizer"]
    options += ["--out", tmp_path / "out"]
    assert main(["store", "build", "--preset", "sharegpt", *map(str, options)]) == 0
    captured = capfd.readouterr()
    assert "ShareGPT" in captured.out and "reading the column" in captured.err
    (document,) = Datastore(tmp_path / "out").iter_documents()
    assert tokenizer.decode(document) == "user: hi\nassistant: hello\n"


def test_help_names_licence_and_size(capsys):
    with pytest.raises(SystemExit):
        main(["store", "build", "--help"])
    offered = " ".join(capsys.readouterr().out.split())
    for name, preset in PRESETS.items():
        assert f"{name} ({preset.license}; {preset.size})" in offered


def test_the_first_tokens_of_a_corpus(tmp_path, tokenizer):
    rows = datasets.Dataset.from_dict({"text": ["abcd", "efg", "hij", "k"]})
    for most, count in ((1, 1), (5, 1), (6, 2), (9, 2), (10, 3), (100, 4)):
        store = Datastore.build(rows, tokenizer, tmp_path / str(most), max_tokens=most)
        assert store.documents == count
