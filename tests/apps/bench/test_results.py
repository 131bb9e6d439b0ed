"""results.json is written as a whole, and nothing else is read as one."""

from __future__ import annotations

import json

import pytest
from bench_samples import entry, results, sample

from hf_refspec.apps.bench.results import new_results, read_results, write_results

SAMPLE = sample("plain", 11, 11, 1.0, 10.0)


def test_what_is_written_is_read(tmp_path):
    made = new_results(tmp_path / "out", {"model": "tiny"}, "cpu")
    assert made["machine"]["cores"] >= 1 and "torch" in made["versions"]
    made["suites"] = results(rag=[entry("1", [SAMPLE])])["suites"]
    write_results(made, tmp_path / "out")
    assert read_results(tmp_path / "out") == made
    assert read_results(tmp_path / "out" / "results.json") == made
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["results.json"]


def test_earlier_results_and_files_are_not_overwritten(tmp_path):
    write_results(results(), tmp_path)
    with pytest.raises(FileExistsError, match=r"results.json exists; choose another --out"):
        new_results(tmp_path, {}, "cpu")
    with pytest.raises(FileExistsError, match="is a file; name a folder"):
        new_results(tmp_path / "results.json", {}, "cpu")


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"format": 7}',
        '{"format": 4, "suites": {}}',
        '{"format": 7, "suites": {"rag": {"entries": []}}}',
        *(
            json.dumps(results(rag=[measured]))
            for measured in (
                {"samples": []},
                {"samples": [{"method": "plain"}]},
                {"samples": [{**SAMPLE, "decoding_seconds": 0}]},
                {"samples": [{**SAMPLE, "tokens": "x"}]},
                "text",
            )
        ),
    ],
)
def test_another_file_is_refused(tmp_path, content):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(ValueError, match=r"a\.json holds no results of hf-refspec bench"):
        read_results(tmp_path / "a.json")
