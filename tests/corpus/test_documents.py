"""What a datastore is built from."""

import os
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch

from hf_refspec.corpus.documents import open_source


@pytest.fixture
def folder(tmp_path) -> Path:
    for name, text in {
        "b.py": "b = 1\r\n",
        "a/z.py": "z",
        "a/y.txt": "y",
        ".hidden.py": "no",
        ".git/c.py": "no",
        "a-b.py": "",
    }.items():
        (tmp_path / "corpus" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "corpus" / name).write_bytes(text.encode())
    return tmp_path / "corpus"


HI = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
ROWS = [{"text": "one", "n": 1}, {"messages": HI}, {"content": "two"}]
READ = {
    "texts": (["one", "", "two"], ["one", "", "two"]),
    "no text": ([""], [""]),
    "an iterator": ((text for text in ("one", "two")), ["one", "two"]),
    "nothing": (iter(()), []),
    "arrays of strings": (np.array(["one", "two"]), ["one", "two"]),
    "arrays of objects": (np.array(["one", "two"], object), ["one", "two"]),
    "ids": (
        [[3, 258], (5,), np.array([6], np.uint32), torch.tensor([7, 8]), []],
        [[3, 258], [5], [6], [7, 8], []],
    ),
    "an array of ids": (np.array([[3, 4], [5, 6]]), [[3, 4], [5, 6]]),
    "rows": (ROWS, ["one", "user: hi\n", "two"]),
    "an iterator of rows": (iter(ROWS), ["one", "user: hi\n", "two"]),
    "rows with arrays": (
        [{"messages": np.array(HI, object), "n": np.arange(3)}, {"text": "two"}],
        ["user: hi\n", "two"],
    ),
}


@pytest.mark.parametrize(("source", "documents"), READ.values(), ids=READ)
def test_every_kind_of_source_is_read(read, source, documents):
    found = read(source)
    assert [each if isinstance(each, str) else each.tolist() for each in found] == documents


SPLIT = datasets.Dataset.from_dict({"text": ["a"]})
REFUSED = [
    ([[1], [2, 259]], "document 1 has the id 259, but the tokenizer's ids are from 0 to 258"),
    ([[-1]], "document 0 has the id -1"),
    ([[2**70]], "document 0"),
    (["a", 7], "document 1 must be a text or one list of ids .* but has the type int: 7"),
    *(
        ([bad], f"document 0 must .* has the type {type(bad).__name__}: ")
        for bad in (b"a", [1.5], [True], [[1, 2], [3]], [[1, 2]], ["a"], None)
    ),
    (b"text", "document 0 must be a text or one list of ids"),
    (datasets.DatasetDict({"train": SPLIT, "test": SPLIT}), r"a split .*\['train', 'test'\]"),
    *(
        (text, r"is neither a file nor a folder; name .*\[text\]")
        for text in ("def f(): pass", "a\0b", "x" * 10_000, "")
    ),
    ([{"text": "one"}, {"id": 5}], r"document 1: which column .* \['id'\]"),
    (np.array([["one"]]), "document 0 must be a text"),
    ({"text": ["one", "two"]}, "text must be a text or one list of ids"),
    *(
        ({"a": "one", name: "two"}, "of a document has a control character")
        for name in ("a\nb", "\t", "\x7f")
    ),
]


@pytest.mark.parametrize(("source", "message"), REFUSED)
def test_what_is_no_source_or_no_document_is_named(read, source, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        read(source)


def test_a_folder_is_read_in_order_without_hidden_files(read, folder):
    assert read(folder) == ["", "y", "z", "b = 1\r\n"]
    assert read(str(folder), pattern="*.py") == ["", "z", "b = 1\r\n"]


def test_files_and_lists_of_files(read, folder):
    assert read(folder / "b.py") == read(str(folder / "b.py")) == ["b = 1\r\n"]
    assert read([folder / "b.py", folder / "a"]) == ["b = 1\r\n", "y", "z"]
    assert read([str(folder / "b.py")]) == ["b = 1\r\n"]
    assert read([str(folder), str(folder / "b.py")])[-2:] == ["b = 1\r\n"] * 2
    assert read([str(folder), "a text"]) == [str(folder), "a text"]
    with pytest.raises(FileNotFoundError, match=r"missing\.py"):
        read([str(folder / "b.py"), str(folder / "missing.py")])


def test_names_have_no_folders_of_this_machine(tokenizer, folder):
    def name(source):
        return open_source(source, tokenizer).name

    assert name(folder) == "corpus"
    assert name([folder / "b.py", folder / "a"]) == "b.py, a"
    assert name([folder / "b.py"] * 4) == "4 files"
    assert name(["text"]) == "unnamed"


def test_invalid_utf8_is_replaced_and_told_once(read, tmp_path, caplog):
    for i, content in enumerate([b"ok", b"\xff\xfe\0a", b"caf\xe9"]):
        (tmp_path / f"{i}.txt").write_bytes(content)
    assert read(tmp_path) == ["ok", "\ufffd\ufffd\0a", "caf\ufffd"]
    assert read(["a\ud800b", "ok"]) == ["a?b", "ok"]
    files, texts = caplog.messages
    assert "in 2 of 3 files, which should be UTF-8" in files and "1.txt" in files
    assert texts == "replaced invalid characters in 1 text"


def test_a_pipe_or_a_device_is_refused_and_not_waited_for(read, folder):
    os.mkfifo(folder / "pipe.py")
    (folder / "zeros.py").symlink_to("/dev/zero")
    for path in (folder / "pipe.py", folder / "zeros.py", Path("/dev/zero")):
        for source in (path, str(path), [path], [folder / "b.py", path]):
            with pytest.raises(FileNotFoundError, match=f"'{path}' is neither .* output of a pipe"):
                read(source)
    assert read(folder) == ["", "y", "z", "b = 1\r\n"]


def test_loops_of_links_end(read, folder):
    for name, target in {
        "loop": ".",
        "a/up": "..",
        "self": "self",
        "one": "two",
        "two": "one",
        "dangling": "nothing",
        "c.py": "b.py",
    }.items():
        (folder / name).symlink_to(target)
    assert read(folder, pattern="*.py") == ["", "z", "b = 1\r\n", "b = 1\r\n"]
    assert len(read(folder)) == 5
    with pytest.raises(FileNotFoundError, match="is neither a file nor a folder"):
        read(folder / "self")


def test_links_out_of_a_folder_or_to_hidden_files_are_skipped_and_counted(read, folder, caplog):
    outside = folder.parent / "outside"
    outside.mkdir()
    (outside / "secret.py").write_text("secret")
    for name, target in {
        "notes.py": outside / "secret.py",
        "up.py": Path("..") / "outside" / "secret.py",
        "hidden.py": folder / ".git" / "c.py",
        "again.py": folder / "a" / "z.py",
        "linked": outside,
    }.items():
        (folder / name).symlink_to(target)
    assert sorted(read(folder)) == ["", "b = 1\r\n", "y", "z", "z"]
    assert "skipped 3 links in" in caplog.text and "hidden.py" in caplog.text
    with pytest.raises(FileNotFoundError, match="has no file that matches"):
        read(folder, pattern="linked/*.py")
    assert read(folder / "notes.py") == ["secret"]  # a link that is named is meant


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_a_column_of_a_frame_is_read(read, library):
    assert read(pytest.importorskip(library).DataFrame({"a": ["x", "y"]})["a"]) == ["x", "y"]


def test_what_is_missing_in_pandas_is_no_document(read, tmp_path):
    pandas = pytest.importorskip("pandas")
    assert read(pandas.Series(["one", None, float("nan"), "two"])) == ["one", "", "", "two"]
    assert read(pandas.Series(["one", pandas.NA], dtype="string")) == ["one", ""]
    twice = pandas.DataFrame([["a", "b"]], columns=["text", "text"])
    with pytest.raises(ValueError, match=r"[Dd]uplicate column names"):
        read(twice)
    pandas.DataFrame({"messages": [HI] * 2}).to_parquet(tmp_path / "chats.parquet")
    frame = pandas.read_parquet(tmp_path / "chats.parquet")  # its lists are arrays
    assert read(frame) == ["user: hi\n"] * 2


def test_rows_of_any_iterable_are_read_by_a_named_column(read):
    assert read(({"a": f"{i}", "text": "x"} for i in range(2)), column="a") == ["0", "1"]


def test_all_rows_of_a_frame_are_read_whatever_its_index(read):
    pandas = pytest.importorskip("pandas")
    texts = [f"{i}" for i in range(2500)]
    for index in (np.arange(2500) / 10, np.arange(2500)[::-1], [f"{i}" for i in range(2500)]):
        assert read(pandas.DataFrame({"text": texts}, index=index)) == texts
        assert read(pandas.Series(texts, index=index)) == texts
