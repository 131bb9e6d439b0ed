"""Two runs are compared on the prompts that both have measured."""

from __future__ import annotations

import pytest
from bench_samples import Asked, retrieval_entry, retrieval_sample, sample

from hf_refspec.bench.compare import comparison
from hf_refspec.bench.methods import BASELINE, OURS, PUBLISHED
from hf_refspec.bench.results import Results
from hf_refspec.cli import main


def results(seconds: float, names: str, **settings) -> Results:
    made = Results({}, {"torch": "2"}, settings)
    made.begin("rag", 3)
    for name in names:
        samples = [sample("plain", 11, 11, 1.0, 10.0), sample("ours", 11, 5, 1.0, seconds)]
        made.add("rag", Asked(name), [{"name": name, "samples": samples}], None)
    return made


def test_shows_what_differs():
    text = comparison(results(5.0, "ab", dtype="x"), results(4.0, "bc", dtype="y"))
    assert "| dtype | x | y |" in text
    assert "torch" not in text
    assert "## rag, 1 prompts" in text
    speeds = "2.0 [2.0, 2.0] → 2.5 [2.5, 2.5] | +25.0%"
    speed_ups = "2.00 [2.00, 2.00] → 2.50 [2.50, 2.50] | +25.0%"
    assert f"| ours | 8 | 2.20 → 2.20 | +0.0% | {speeds} | {speed_ups} | 1.83" in text


def test_nothing_in_common_is_refused():
    with pytest.raises(ValueError, match="no prompt in common"):
        comparison(results(5.0, "a"), results(4.0, "b"))


def test_from_the_command_line(tmp_path, capsys):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        results(5.0, "ab").write(tmp_path / name)
    assert main(["bench", "compare", str(tmp_path / "a"), str(tmp_path / "b/results.json")]) == 0
    assert "## rag, 2 prompts" in capsys.readouterr().out
    assert main(["bench", "compare", str(tmp_path / "a")]) == 2
    assert "takes two results, but got 1" in capsys.readouterr().err
    assert main(["bench", "compare", str(tmp_path / "a"), str(tmp_path / "c.json")]) == 2
    assert "c.json is missing: name a results.json, or its folder" in capsys.readouterr().err


def test_prompts_of_the_same_name_with_another_text_are_not_compared():
    one, other = results(5.0, "ab"), Results({}, {}, {})
    other.begin("rag", 1)
    samples = [sample("plain", 11, 11, 1.0, 10.0)]
    other.add("rag", Asked("a", ids=[7]), [{"name": "a", "samples": samples}], None)
    with pytest.raises(ValueError, match="no prompt in common"):
        comparison(one, other)


def retrieval_results(seconds: dict[str, float]) -> Results:
    made = Results({}, {}, {})
    made.begin("ralm", 1)
    for retriever in ("flat", "bm25"):
        runs = [retrieval_sample(method, 0, taken) for method, taken in seconds.items()]
        entry = {**retrieval_entry("a", runs), "retriever": retriever}
        made.add("ralm", Asked(retriever), [entry], None)
    return made


def test_retrieval_is_compared_by_retriever_and_method():
    one = retrieval_results({BASELINE: 8.0, OURS: 4.0, PUBLISHED: 5.0})
    text = comparison(one, retrieval_results({BASELINE: 8.0, OURS: 2.0}))
    flat, bm25 = text.partition("## ralm, bm25, 1 prompts")[::2]
    assert "## ralm, flat, 1 prompts" in flat
    for part in (flat, bm25):
        assert f"| {OURS} | " in part
        assert "| 2.00 [2.00, 2.00] → 4.00 [4.00, 4.00] | +100.0% |" in part
    assert PUBLISHED not in text  # measured once only
