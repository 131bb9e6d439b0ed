"""results.json is whole at any time, and only gone on with by the same settings."""

from __future__ import annotations

import json

import pytest
from bench_samples import Asked, sample

from hf_refspec.bench.results import Results, fingerprint, open_results

SAMPLE = sample("plain", 11, 11, 1.0, 10.0)


def fresh(**settings) -> Results:
    return Results({"cpu": "x"}, {"torch": "2"}, {"model": "tiny", **settings})


def test_what_is_written_is_read(tmp_path):
    results = open_results(tmp_path / "out", fresh(), resume=False)
    results.begin("rag", 3)
    results.add("rag", Asked("1"), [{"name": "1", "samples": []}], None)
    results.add("rag", Asked("2"), [], "too long")
    results.write(tmp_path / "out")
    again = Results.read(tmp_path / "out")
    assert again == results == Results.read(tmp_path / "out" / "results.json")
    assert again.is_done("rag", Asked("2")) and not again.is_done("rag", Asked("3"))
    asked = fingerprint(Asked("1"))
    assert again.entries("rag") == [{"name": "1", "samples": [], "asked": asked}]
    with pytest.raises(ValueError, match="rag, question 1 was measured with another text"):
        again.is_done("rag", Asked("1", ids=[1, 3]))
    assert again.skipped("rag") == ["too long"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["results.json"]


def test_results_are_gone_on_with_only_if_asked_and_with_the_same_settings(tmp_path):
    open_results(tmp_path, fresh(), resume=True).write(tmp_path)
    with pytest.raises(FileExistsError, match=r"results.json exists; add --resume"):
        open_results(tmp_path, fresh(), resume=False)
    assert open_results(tmp_path, fresh(), resume=True) == fresh()
    with pytest.raises(ValueError, match="with model 'tiny', not '8B'"):
        open_results(tmp_path, fresh(model="8B"), resume=True)
    with pytest.raises(ValueError, match="with replay None, not True"):
        open_results(tmp_path, fresh(replay=True), resume=True)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"format": 3}',
        '{"format": 1, "machine": {}, "versions": {}, "settings": {}}',
        '{"format": 3, "machine": {}, "versions": {}, "settings": {}, "suites": {"rag": {}}}',
        '{"format": 3, "machine": {}, "versions": {}, "settings": {}, "suites": []}',
    ],
)
def test_another_file_is_refused(tmp_path, content):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(ValueError, match=r"a\.json holds no results of hf-refspec bench"):
        Results.read(tmp_path / "a.json")


@pytest.mark.parametrize(
    "entry",
    [
        {"samples": [], "asked": "x"},
        {"samples": [{"method": "plain"}], "name": "a", "asked": "x"},
        {"runs": [SAMPLE], "name": "a", "asked": "x", "retriever": "flat"},
        {"samples": [{**SAMPLE, "decoding_seconds": 0}], "name": "a", "asked": "x"},
        {"samples": [{**SAMPLE, "tokens": "x"}], "name": "a", "asked": "x"},
        {"samples": [{**SAMPLE, "way": "plain"}], "name": "a", "asked": "x"},
        "text",
    ],
)
def test_an_entry_that_no_suite_has_measured_is_refused(tmp_path, entry):
    results = fresh()
    results.suites["rag"] = {"questions": 1, "done": {"1": {"entries": [entry], "skipped": None}}}
    results.write(tmp_path)
    with pytest.raises(ValueError, match="holds no results of hf-refspec bench"):
        Results.read(tmp_path)


def test_a_fingerprint_is_of_what_is_asked_and_not_of_what_it_is_put_to():
    assert fingerprint(Asked("1", of=object())) == fingerprint(Asked("1"))
    assert fingerprint(Asked("1", of=Asked("2"))) != fingerprint(Asked("1"))
    assert fingerprint(Asked("1", ids=[2, 1])) != fingerprint(Asked("1"))


def test_a_smaller_limit_loses_nothing(tmp_path):
    results = open_results(tmp_path, fresh(), resume=False)
    results.begin("rag", 2)
    for name in "12":
        results.add("rag", Asked(name), [], None)
    results.begin("rag", 1)
    assert results.suites["rag"]["questions"] == 2


def test_a_file_is_no_folder_for_results(tmp_path):
    (tmp_path / "out").write_text("")
    with pytest.raises(FileExistsError, match="out is a file; name a folder"):
        open_results(tmp_path / "out", fresh(), resume=False)


def test_results_of_the_version_before_are_read(tmp_path):
    old = {**SAMPLE, "way": "plain"}
    for name in ("method", "run", "retrieval"):
        del old[name]
    entry = {"name": "a", "asked": "x", "samples": [old]}
    results = fresh()
    results.format = 2
    results.suites["rag"] = {"questions": 1, "done": {"1": {"entries": [entry], "skipped": None}}}
    results.write(tmp_path)
    [read] = Results.read(tmp_path).entries("rag")
    assert read == {**entry, "samples": [SAMPLE]}
    assert json.loads((tmp_path / "results.json").read_text())["format"] == 2
