"""Published data that some tests measure on, and where it comes from; none of it is in the project.

They look for it in the folder that HF_REFSPEC_DATA names, or in ../shared/data beside the checkout.
"""

import os
from pathlib import Path

import pytest

FOLDER = Path(os.environ.get("HF_REFSPEC_DATA") or Path(__file__).parents[3] / "shared" / "data")
SOURCES = {
    "llma_rag.jsonl": "github.com/microsoft/LMOps, llma/src/data/rag.jsonl",
    "HumanEval.jsonl.gz": "github.com/openai/human-eval, data/HumanEval.jsonl.gz",
    "spec_bench_questions.jsonl": "github.com/hemingkx/Spec-Bench, data/spec_bench/question.jsonl",
    "llama2-tokenizer": "github.com/karpathy/llama2.c, tokenizer.model, in Hugging Face form",
}
missing: set[str] = set()


def data_file(name: str) -> Path:
    """A file of the data; the test is skipped where it is absent."""
    path = FOLDER / name
    if not path.exists():
        missing.add(name)
        pytest.skip(f"needs {name}")
    return path


def whats_missing() -> list[str]:
    """What tests were skipped for, and where to get it; a line each."""
    lines = [f"{name}: {SOURCES[name]}" for name in SOURCES if name in missing]
    if lines:
        about = "some tests were skipped for want of data; put it into a folder and name that in"
        lines.insert(0, f"{about} HF_REFSPEC_DATA:")
    return lines
