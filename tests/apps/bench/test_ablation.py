"""`hf-refspec ablate` measures both forms at several sizes, and writes what it has measured."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from hf_refspec.apps.bench import ablation
from hf_refspec.apps.bench.ablation import COMPACT, FULL_MIXED, FULL_REST, ablate
from hf_refspec.apps.bench.suites import humaneval
from hf_refspec.apps.cli.main import main
from hf_refspec.store.datastore import Datastore

PROBLEMS = [
    {"prompt": "def area(width, height):\n", "canonical_solution": "    return width * height\n"},
    {"prompt": "def perimeter(width):\n", "canonical_solution": "    return 4 * width\n"},
    {"prompt": "def volume(width):\n", "canonical_solution": "    return width * width * width\n"},
]


@pytest.fixture
def arguments(tmp_path, tokenizer, monkeypatch):
    """Of a small ablation: a store, a tokenizer and problems."""
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    texts = [f"def f{i}(width, height):\n    return width * height + {i}\n" * 3 for i in range(12)]
    Datastore.build(texts, tokenizer, tmp_path / "store", progress=False, num_proc=1)
    with gzip.open(tmp_path / "problems.jsonl.gz", "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(problem) + "\n" for problem in PROBLEMS)
    given = ["ablate", "store", "--data", "problems.jsonl.gz", "--tokenizer", "tokenizer"]
    monkeypatch.chdir(tmp_path)
    return [*given, "--out", "out", "--max-draft-tokens", "8"]


@pytest.mark.usefixtures("arguments")
def test_writes_a_table_and_a_plot_of_both_forms(tmp_path, tokenizer, capsys):
    answers = humaneval("problems.jsonl.gz", tokenizer)
    sizes = {"fractions": (1 / 2, 1), "megabytes": (0.006, 0.03)}
    ablate(Datastore("store"), tokenizer, answers, 8, Path("out"), **sizes)
    points = json.loads((tmp_path / "out" / "ablation.json").read_text())
    assert [point["form"] for point in points] == [FULL_REST, FULL_MIXED] * 2 + [COMPACT] * 2
    sizes = {form: [p["size"] for p in points if p["form"] == form] for form in ablation_forms()}
    assert sizes[FULL_REST] == sizes[FULL_MIXED] == sorted(sizes[FULL_REST])
    assert 1.5 < sizes[FULL_REST][1] / sizes[FULL_REST][0] < 2.5
    assert sizes[COMPACT][0] <= 6000 < sizes[COMPACT][1] <= 30_000
    assert all(point["mat"] > 1.2 for point in points)
    assert (tmp_path / "out" / "ablation.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].split() == ["form", "MB", "MAT"]
    assert [line.split()[-1] for line in printed[1:]] == [f"{p['mat']:.3f}" for p in points]
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"out", "problems.jsonl.gz", "store", "tokenizer"}


def ablation_forms() -> tuple[str, ...]:
    return FULL_REST, FULL_MIXED, COMPACT


def test_measures_the_first_prompts_only_if_asked(arguments, monkeypatch):
    counts = []
    replay = ablation.replay

    def counted(answers, *others):
        counts.append((len(answers), others[-1]))
        return replay(answers, *others)

    monkeypatch.setattr(ablation, "replay", counted)
    assert main([*arguments, "--limit", "1"]) == 0
    assert set(counts) == {(1, 8)}


def refused(arguments, capsys) -> str:
    capsys.readouterr()
    assert main(arguments) == 2
    printed, line = capsys.readouterr()
    assert printed == ""
    assert line.startswith("hf-refspec: ") and line.count("\n") == 1
    return line


def test_a_folder_that_exists_is_refused_and_stays(tmp_path, arguments, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    assert "out exists" in refused(arguments, capsys)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]


def test_bad_input_leaves_nothing_behind(tmp_path, arguments, capsys):
    (tmp_path / "problems.jsonl.gz").rename(tmp_path / "elsewhere")
    assert "problems.jsonl.gz" in refused(arguments, capsys)
    Datastore(tmp_path / "store").compact(tmp_path / "compact", progress=False)
    arguments[1] = "compact"
    assert "only the compact form" in refused(arguments, capsys)
    arguments[1] = "missing"
    assert "missing" in refused(arguments, capsys)
    assert not (tmp_path / "out").exists()
