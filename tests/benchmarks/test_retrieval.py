"""Speculative retrieval is measured with all retrievers and both indexes, against the baseline."""

from __future__ import annotations

import json
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import retrieval
import torch
from encoders import load_letters
from retrieval import BATCHES, DRAFTS, METHODS, OURS, main, retrievers

from hf_refspec.ralm.iterative import iterative_ralm
from hf_refspec.ralm.stats import RetrievalStats
from hf_refspec.retrieval.retriever import Retrieved
from hf_refspec.store.build.presets import python_stdlib

DENSE = ["--encoder", "letters-64"]
SIZES = ["--vectors", "100", "--graph", "60"]


@pytest.fixture
def folder(model, data, monkeypatch) -> str:
    """What `build` makes of a few files, with names looked up nowhere."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(retrieval, "load_encoder", load_letters)
    monkeypatch.setattr(retrieval, "python_files", lambda: python_stdlib()[:2])
    monkeypatch.setattr(retrieval, "FILES", 1)
    monkeypatch.setattr(retrieval, "ENTRIES", 40)
    assert main(["build", "built", *model, *DENSE, "--data", str(data), "--vectors", "200"]) == 0
    return "built"


@pytest.fixture
def tables(printed_rows):
    """The cells of each table that was printed since the last call, by its first heading."""

    def found() -> dict[str, list[list[str]]]:
        by_heading: dict[str, list[list[str]]] = {}
        for cells in printed_rows():
            if cells[1] in ("searches", "1"):
                rows = by_heading.setdefault(cells[0], [])
            else:
                rows.append(cells)
        return by_heading

    return found
