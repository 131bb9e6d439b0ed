"""Packages that come with an extra."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def require(package: str, needed_by: str, extra: str) -> Any:
    """Imports a package of an extra; raises an ImportError that says how to install it."""
    try:
        return import_module(package)
    except ImportError:
        raise ImportError(
            f'{needed_by} needs {package}: pip install "hf_refspec[{extra}]"'
        ) from None
