"""Lines of JSON are read, and what is wrong with one is named by its line."""

from __future__ import annotations

import gzip

import pytest

from hf_refspec.apps.bench.records import Record, read_records


def test_reads_objects_with_where_they_stand(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes('\ufeff{"a": "é\u2028"}\n\n{"a": "x"}\n'.encode())
    one, other = read_records(path)
    assert one.text("a") == "é\u2028"
    assert other.where == f"{path}, line 3"


@pytest.mark.parametrize("value", [None, [], ["x", 1], "text", {"x": "y"}])
def test_what_is_not_there_is_named_with_its_line(value):
    record = Record("the line", {"a": value})
    with pytest.raises(ValueError, match=r"the line: a\.b must be text"):
        record.text("a", "b")
    with pytest.raises(ValueError, match="the line: a must be a list of texts"):
        record.texts("a")


@pytest.mark.parametrize("line", [b"{", b"[1]", b"3", b"{'a': 1}", b'{"a": "\xff"}'])
def test_a_line_that_is_no_object_is_named(tmp_path, line):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\n' + line + b"\n")
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2"):
        read_records(path)


def test_a_file_that_is_missing_or_damaged_is_named(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    with pytest.raises(FileNotFoundError, match=r"a.jsonl.gz is missing.*benchmarks/README.md"):
        read_records(path)
    for content in (b"no gzip", gzip.compress(b"{}" * 500, mtime=0)[:-9]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"a.jsonl.gz is damaged"):
            read_records(path)
