"""The standard library as a corpus, and the beginning of one."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import datasets

from hf_refspec.corpus import documents
from hf_refspec.corpus.documents import python_stdlib
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


def test_the_first_tokens_of_a_corpus(tmp_path, tokenizer):
    rows = datasets.Dataset.from_dict({"text": ["abcd", "efg", "hij", "k"]})
    for most, count in ((1, 1), (5, 1), (6, 2), (9, 2), (10, 3), (100, 4)):
        store = Datastore.build(rows, tokenizer, tmp_path / str(most), max_tokens=most)
        assert store.documents == count
