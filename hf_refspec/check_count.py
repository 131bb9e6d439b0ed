"""Checking an option that counts something."""

from __future__ import annotations

from typing import Any

import numpy as np


def check_count(name: str, value: Any, otherwise: str = "") -> None:
    """Refuses an option that is not a whole number above 0."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} must be an int{otherwise}, but is {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, but is {value}")
