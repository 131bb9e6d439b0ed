"""Lines of JSON are read, and what is wrong with one is told by its line."""

from __future__ import annotations

import gzip

import pytest

from hf_refspec.apps.bench.records import Record, read_records


def test_reads_objects_with_where_they_stand(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": "é\u2028"}\n\n{"a": "x"}\n', encoding="utf-8")
    one, other = read_records(path)
    assert one.text("a") == "é\u2028"
    assert other.where == f"{path}, line 3"


@pytest.mark.parametrize("line", ["{", "[1]", '"text"', "3", "{'a': 1}"])
def test_a_line_that_is_no_object_is_named(tmp_path, line):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2"):
        read_records(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"missing.jsonl is missing.*benchmarks/README.md"):
        read_records(tmp_path / "missing.jsonl")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl.gz", b"no gzip"),
        ("b.jsonl.gz", gzip.compress(b"{}" * 500, mtime=0)[:-9]),
    ],
)
def test_a_damaged_file_is_named(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{name} is damaged"):
        read_records(tmp_path / name)


def test_a_line_that_is_no_text_is_named_and_a_byte_order_mark_is_none_of_it(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"a": 1}\n{"a": "\xff"}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2 is not JSON: .*utf-8"):
        read_records(tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"a": 1}\n')
    assert read_records(tmp_path / "a.jsonl")[0].content == {"a": 1}


@pytest.mark.parametrize("content", [{}, {"a": 1}, {"a": {"b": None}}, {"a": "text"}])
def test_a_text_that_is_not_there_is_named_with_its_line(content):
    with pytest.raises(ValueError, match=r"the line: a\.b must be text"):
        Record("the line", content).text("a", "b")


@pytest.mark.parametrize("value", [None, [], ["x", 1], "text", {"x": "y"}])
def test_texts_that_are_not_there_are_named_with_their_line(value):
    with pytest.raises(ValueError, match="the line: a must be a list of texts"):
        Record("the line", {"a": value}).texts("a")


@pytest.mark.parametrize(("value", "texts"), [(["x"], ["x"]), ([["x"]], None), (None, None)])
def test_optional_texts_may_be_something_else(value, texts):
    assert Record("the line", {"a": value}).optional_texts("a") == texts


def test_optional_texts_that_are_no_list_are_named_with_their_line():
    with pytest.raises(ValueError, match="the line: a must be a list, but is 'x'"):
        Record("the line", {"a": "x"}).optional_texts("a")
