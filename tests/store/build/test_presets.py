"""Corpora with a name."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

import datasets
import pytest

from hf_refspec.apps.cli.main import main
from hf_refspec.store.build import presets
from hf_refspec.store.build.presets import PRESETS, python_stdlib
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
    monkeypatch.setattr(presets.sysconfig, "get_path", lambda name: {"stdlib": str(root)}[name])
    assert [file.relative_to(root).as_posix() for file in python_stdlib()] == sorted(ours)


LOCAL = {
    "ultrachat": [{"id": "0", "data": ["What is up?", "The sky is up."]}],
    "sharegpt": [
        {
            "id": "a_0",
            "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}],
        }
    ],
    "the-stack-python": [
        {"hexsha": "0f" * 20, "size": 9, "content": "import os\n", "lang": "Python"}
    ],
    "wikipedia": [
        {"id": "12", "url": "https://w/Anarchism", "title": "Anarchism", "text": "Anarchism is"}
    ],
}
TEXTS = {
    "ultrachat": "user: What is up?\nassistant: The sky is up.\n",
    "sharegpt": "user: hi\nassistant: hello\n",
    "the-stack-python": "import os\n",
    "wikipedia": "Anarchism is",
}


@pytest.fixture
def copies(tmp_path):
    """A small copy of each preset's dataset, laid out as on the Hub."""
    for name, rows in LOCAL.items():
        options = PRESETS[name].options
        file = options.get("data_files", "train-00000.jsonl")
        path = tmp_path / name / options.get("data_dir", "") / file
        path.parent.mkdir(parents=True)
        content = json.dumps(rows) if file.endswith(".json") else "\n".join(map(json.dumps, rows))
        path.write_text(content)
    card = "---\nconfigs:\n- config_name: 20231101.en\n  data_files: '*.jsonl'\n---\n"
    (tmp_path / "wikipedia" / "README.md").write_text(card)
    return tmp_path


@pytest.mark.parametrize("name", LOCAL)
def test_a_preset_reads_a_copy_of_its_dataset(copies, tmp_path, tokenizer, name, capfd):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    arguments = [
        "--preset",
        name,
        "--dataset",
        copies / name,
        "--tokenizer",
        tmp_path / "tokenizer",
    ]
    assert main(["store", "build", *map(str, arguments), "--out", str(tmp_path / "out")]) == 0
    captured = capfd.readouterr()
    assert PRESETS[name].corpus in captured.out
    assert "reading the column" in captured.err
    (document,) = Datastore(tmp_path / "out").iter_documents()
    assert tokenizer.decode(document) == TEXTS[name]


def test_help_names_licence_and_size(capsys):
    with pytest.raises(SystemExit):
        main(["store", "build", "--help"])
    offered = " ".join(capsys.readouterr().out.split())
    for name, preset in PRESETS.items():
        assert f"{name} ({preset.license}; {preset.size})" in offered


def test_the_first_tokens_of_a_corpus(tmp_path, tokenizer):
    rows = datasets.Dataset.from_dict({"text": ["abcd", "efg", "hij", "k"]})
    for most, documents in ((1, 1), (5, 1), (6, 2), (9, 2), (10, 3), (100, 4)):
        store = Datastore.build(rows, tokenizer, tmp_path / str(most), max_tokens=most)
        assert store.documents == documents
    with pytest.raises(ValueError, match="max_tokens"):
        Datastore.build(rows, tokenizer, tmp_path / "0", max_tokens=0)
