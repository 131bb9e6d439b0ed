"""What a figure was measured with: the machine and the versions."""

from __future__ import annotations

import os
import platform
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from ..version import __version__

PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "numba")


def describe_machine(device: str) -> dict[str, Any]:
    """The processor, and the GPU if that is the device."""
    machine: dict[str, Any] = {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    if device == "cuda":
        gpu = torch.cuda.get_device_properties(0)
        machine |= {"gpu": gpu.name, "gpu_gigabytes": round(gpu.total_memory / 1e9)}
    return machine


def describe_versions() -> dict[str, str | None]:
    """Of all that takes part in the work."""
    return {
        "python": platform.python_version(),
        "hf_refspec": f"{__version__} {_sources()}",
        **{name: version(name) for name in PACKAGES},
        "cuda": torch.version.cuda,
    }


def _sources() -> str:
    """A digest of this package's code: two commits have the same version."""
    package = Path(__file__).parents[1]
    digest = sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:8]


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown")
