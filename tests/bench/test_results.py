"""results.json is whole at any time, and only gone on with by the same settings."""

from __future__ import annotations

import pytest

from hf_refspec.bench.results import Results, open_results


def fresh(**settings) -> Results:
    return Results({"cpu": "x"}, {"torch": "2"}, {"model": "tiny", **settings})


def test_what_is_written_is_read(tmp_path):
    results = open_results(tmp_path / "out", fresh(), resume=False)
    results.begin("rag", 3)
    results.add("rag", "1", [{"name": "1"}], None)
    results.add("rag", "2", [], "too long")
    results.write(tmp_path / "out")
    again = Results.read(tmp_path / "out")
    assert again == results == Results.read(tmp_path / "out" / "results.json")
    assert again.is_done("rag", "2") and not again.is_done("rag", "3")
    assert again.entries("rag") == [{"name": "1"}]
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
        '{"format": 2}',
        '{"format": 1}',
        '{"format": 1, "machine": {}, "versions": {}, "settings": {}, "suites": {"rag": {}}}',
        '{"format": 1, "machine": {}, "versions": {}, "settings": {}, "suites": []}',
    ],
)
def test_another_file_is_refused(tmp_path, content):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(ValueError, match=r"a\.json holds no results of hf-refspec bench"):
        Results.read(tmp_path / "a.json")
