"""Small data files of every suite, and entries as `hf-refspec bench` writes them, for its tests."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from hf_refspec.apps.bench.results import FORMAT

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
    {
        "question_id": 101,
        "category": "math",
        "turns": SUM,
        "reference": ["It is four.", "It is five."],
    },
    {
        "question_id": 161,
        "category": "translation",
        "turns": ["Translate to English: eine Katze"],
        "reference": ["a cat"],
    },
    {"question_id": 321, "category": "rag", "turns": ["Why?"], "reference": [["so", "yes"]]},
]


def lines(records: list[dict]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def write_data(folder: Path) -> Path:
    """Writes the data files to a new folder."""
    folder.mkdir()
    (folder / "llma_rag.jsonl").write_text(lines(RAG), encoding="utf-8")
    (folder / "spec_bench_questions.jsonl").write_text(lines(QUESTIONS), encoding="utf-8")
    with gzip.open(folder / "HumanEval.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write(lines(PROBLEMS))
    return folder


def sample(
    method: str, tokens: int, passes: int, prefill: float, decoding: float, **others: Any
) -> dict[str, Any]:
    return {
        "method": method,
        "nodes": 8,
        "tokens": tokens,
        "forward_passes": passes,
        "prefill_seconds": prefill,
        "decoding_seconds": decoding,
        "drafting_seconds": 0.0,
        "learning_seconds": 0.0,
        "peak_bytes": 0,
        "other_tokens": 0,
        "first_difference": None,
        "figures": {},
        **others,
    }


def retrieving(method: str, seconds: float, **figures: float) -> dict[str, Any]:
    """Of 8 tokens, half of the time for the prefill."""
    return sample(method, 8, 8, seconds / 2, seconds / 2, nodes=0, figures=figures)


def entry(name: str, samples: list[dict], text: str = "x", **others: Any) -> dict[str, Any]:
    return {"name": name, "text": text, "prompt_tokens": 9, "samples": samples, **others}


def results(dtype: str = "float32", **suites: list[dict]) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "machine": {"cpu": "x"},
        "versions": {"torch": "2"},
        "settings": {"model": "tiny"},
        "suites": {
            f"{name}, {dtype}": {
                "suite": name,
                "dtype": dtype,
                "questions": 3,
                "done": len(entries),
                "entries": entries,
                "skipped": [],
            }
            for name, entries in suites.items()
        },
    }
