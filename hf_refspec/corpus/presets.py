"""Corpora with a name: those of REST and RaLMSpec, and one that every machine has."""

from __future__ import annotations

import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Preset:
    """A corpus: a dataset, or the files of [`python_stdlib`]."""

    corpus: str
    license: str
    size: str  # for people
    dataset: str | None = None  # its Hub id
    options: Mapping[str, Any] = field(default_factory=dict)  # of `datasets.load_dataset`


def python_stdlib() -> list[Path]:
    """The source files of the running interpreter's standard library, its tests included."""
    root = Path(sysconfig.get_path("stdlib"))
    foreign = {"site-packages", "dist-packages"}
    return [
        path
        for path in sorted(root.rglob("*.py"))
        if not foreign.intersection(path.relative_to(root).parts)
    ]


PRESETS = {
    "python-stdlib": Preset("Python standard library", "PSF-2.0", "about 10M tokens"),
    "ultrachat": Preset("UltraChat", "MIT", "1.5M chats", "stingning/ultrachat"),
    "sharegpt": Preset(
        "ShareGPT",
        "Apache-2.0",
        "about 100,000 chats",
        "Aeala/ShareGPT_Vicuna_unfiltered",
        {"data_files": "ShareGPT_V4.3_unfiltered_cleaned_split.json"},
    ),
    "the-stack-python": Preset(
        "The Stack, Python",
        "permissive, of each file",
        "13M files, on request; give --max-tokens",
        "bigcode/the-stack-dedup",
        {"data_dir": "data/python", "streaming": True},
    ),
    "wikipedia": Preset(
        "Wikipedia, English, November 2023",
        "CC-BY-SA-3.0, GFDL",
        "6.4M articles",
        "wikimedia/wikipedia",
        {"name": "20231101.en"},
    ),
}
