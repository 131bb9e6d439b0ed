"""Small data files, for models of bytes."""

import gzip
import json
from pathlib import Path

import pytest

RAG = [
    {"query": f"who is {name}?", "docs": [f"{name} is a cat.", "x"], "result": {"text": answer}}
    for name, answer in (("Tom", " Tom is a cat."), ("Kit", " Kit is a cat."), ("Al", " A cat."))
]
PROBLEMS = [
    {"prompt": f"def f{i}(width):\n", "canonical_solution": f"    return width * {i}\n"}
    for i in range(2)
]
TALE = ["Tell a tale.", "Tell it again, but more slowly, and leave nothing out."]
SUM = ["What is two and two?", "And one more than that, if you please, and then another?"]
QUESTIONS = [
    {"question_id": 81, "category": "writing", "turns": TALE},
    {"category": "math", "turns": SUM, "reference": ["It is four.", "It is five."]},
    {"category": "translation", "turns": ["Translate: eine Katze"], "reference": ["a cat"]},
    {"category": "rag", "turns": ["Why?"], "reference": [["so", "yes"]]},
]


def lines(records: list[dict]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


@pytest.fixture
def printed_rows(capsys):
    """The cells of the rows of all tables that were printed since the last call."""

    def rows() -> list[list[str]]:
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
        cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
        return [row for row in cells if not set(row[0]) <= set("-:")]

    return rows


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    (folder / "llma_rag.jsonl").write_text(lines(RAG), encoding="utf-8")
    (folder / "spec_bench_questions.jsonl").write_text(lines(QUESTIONS), encoding="utf-8")
    with gzip.open(folder / "HumanEval.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write(lines(PROBLEMS))
    return folder


@pytest.fixture
def model(model_folder, tmp_path, monkeypatch) -> list[str]:
    """The arguments that name a model of bytes, in the test's own working folder."""
    (tmp_path / "model").symlink_to(model_folder)
    monkeypatch.chdir(tmp_path)
    return ["--model", "model", "--device", "cpu"]
