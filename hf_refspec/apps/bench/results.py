"""results.json: all samples of a run, and the machine, versions and settings they belong to."""

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

FORMAT = 6
FILE = "results.json"
PACKAGES = ("torch", "transformers", "numpy", "numba")


def new_results(folder: Path, settings: dict[str, Any], device: str) -> dict[str, Any]:
    """Creates the folder of a run and returns its results, which are still empty.

    Args:
        folder (`Path`): Where they will be written.
        settings (`dict`): The options of the run.
        device (`str`): `"cpu"` or `"cuda"`.

    Raises:
        FileExistsError: If the folder already has results, or is a file.
    """
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"--out {folder} is a file; name a folder")
    if (folder / FILE).exists():
        raise FileExistsError(f"{folder / FILE} exists; choose another --out")
    folder.mkdir(parents=True, exist_ok=True)
    return {
        "format": FORMAT,
        "machine": machine(device),
        "versions": versions(),
        "settings": settings,
        "suites": {},
    }


def write_results(results: dict[str, Any], folder: Path) -> None:
    """Writes results.json; an earlier one is replaced atomically."""
    new = folder / f".{FILE}.new"
    new.write_text(json.dumps(results, indent=1), encoding="utf-8")
    os.replace(new, folder / FILE)


def read_results(path: Path) -> dict[str, Any]:
    """Reads a results.json, named by its own path or by that of its folder.

    Raises:
        FileNotFoundError: If there is none.
        ValueError: If it was not written by this version of `hf-refspec bench`.
    """
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


def versions() -> dict[str, str]:
    """The versions of this package and of those that its speed depends on."""
    return {"hf_refspec": __version__, **{name: version(name) for name in PACKAGES}}


def machine(device: str) -> dict[str, Any]:
    """What a run is measured on; `device` is `"cpu"` or `"cuda"`."""
    about = {"cpu": _cpu_name(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    if device == "cuda":
        about["gpu"] = torch.cuda.get_device_name()
    return about


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown")
