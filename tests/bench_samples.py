"""Samples and entries as `hf-refspec bench` writes them, for its tests."""

from __future__ import annotations

from typing import Any

from hf_refspec.apps.bench.measure import RETRIEVAL_STATS
from hf_refspec.apps.bench.results import FORMAT
from hf_refspec.ralm.stats import RetrievalStats


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
        "other_tokens": 0,
        "first_difference": None,
        "retrieval": None,
        **others,
    }


def retrieval_sample(method: str, seconds: float, **stats: Any) -> dict[str, Any]:
    """Of 8 tokens, half of the time for the prefill."""
    retrieval = {name: getattr(RetrievalStats(), name) for name in RETRIEVAL_STATS} | stats
    return sample(method, 8, 8, seconds / 2, seconds / 2, nodes=0, retrieval=retrieval)


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
