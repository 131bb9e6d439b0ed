"""Checks of options that count something."""

from __future__ import annotations

from typing import Any

import numpy as np

MOST_THREADS = 1024  # of a pool, which starts as many as it is told


def check_count(
    name: str, value: Any, otherwise: str = "", least: int = 1, most: int | None = None
) -> None:
    """Refuses an option that is not a whole number, from `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} must be an int{otherwise}, but is {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, but is {value}")
    if most is not None and value > most:
        raise ValueError(f"{name} must be at most {most}, but is {value}")
