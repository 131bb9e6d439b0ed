"""Corpora that every machine has."""

from __future__ import annotations

import sysconfig
from pathlib import Path


def python_stdlib() -> list[Path]:
    """The source files of the running interpreter's standard library, its tests included."""
    root = Path(sysconfig.get_path("stdlib"))
    foreign = {"site-packages", "dist-packages"}
    return [
        path
        for path in sorted(root.rglob("*.py"))
        if not foreign.intersection(path.relative_to(root).parts)
    ]


PRESETS = {"python-stdlib": (python_stdlib, "Python standard library", "PSF-2.0")}
