"""results.json: all samples of a run, with the machine, the versions and the settings."""

from __future__ import annotations

import json
import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from ...version import __version__
from .summary import summaries

FORMAT = 7
FILE = "results.json"
PACKAGES = ("torch", "transformers", "numpy", "numba")


def new_results(folder: Path, settings: dict[str, Any], device: str) -> dict[str, Any]:
    """Creates the folder of a run and returns its results, still empty; `FileExistsError` if the
    folder already has results, or is a file."""
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"--out {folder} is a file; name a folder")
    if (folder / FILE).exists():
        raise FileExistsError(f"{folder / FILE} exists; choose another --out")
    folder.mkdir(parents=True, exist_ok=True)
    return {
        "format": FORMAT,
        "machine": _machine(device),
        "versions": {"hf_refspec": __version__, **{name: version(name) for name in PACKAGES}},
        "settings": settings,
        "suites": {},
    }


def write_results(results: dict[str, Any], folder: Path) -> None:
    """Writes results.json; an earlier one is replaced atomically."""
    new = folder / f".{FILE}.new"
    new.write_text(json.dumps(results, indent=1), encoding="utf-8")
    os.replace(new, folder / FILE)


def read_results(path: Path) -> dict[str, Any]:
    """Reads a results.json, named by its own path or by its folder's; `ValueError` if this version
    of `hf-refspec bench` did not write it."""
    path = path / FILE if path.is_dir() else path
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: name a results.json, or its folder")
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        if results["format"] != FORMAT:
            raise ValueError(f"its format is {results['format']!r}, not {FORMAT}; measure again")
        for suite in results["suites"].values():
            suite["suite"], suite["dtype"]  # fails where something is missing
            summaries(suite["entries"])
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"{path} holds no results of hf-refspec bench: {error!r}") from None
    return results


def _machine(device: str) -> dict[str, Any]:
    about = {"cpu": _cpu_name(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    if device == "cuda":
        about["gpu"] = torch.cuda.get_device_name()
        about["CUDA"] = torch.version.cuda
    return about


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown")
