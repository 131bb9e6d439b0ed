"""Packages that only some applications need."""

from __future__ import annotations

from importlib import import_module


def require(extra: str, *packages: str) -> None:
    """Refuses to start, before the work begins, without the packages of an extra."""
    for name in packages:
        try:
            import_module(name)
        except ImportError:
            raise ImportError(
                f'{name} is not installed: pip install "hf_refspec[{extra}]"'
            ) from None
