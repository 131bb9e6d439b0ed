"""The decisions of automatic draft budgets, as JSON lines."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from ..generation import budget

NAMES = ("pass_tokens", "seconds", "new_tokens", "sizes", "expected_tokens", "expected_seconds")


class _JsonLines(logging.Handler):
    """Writes the arguments of each message of a budget."""

    def __init__(self, file: TextIO) -> None:
        super().__init__()
        self._file = file

    def emit(self, record: logging.LogRecord) -> None:
        decision = dict(zip(NAMES, record.args or (), strict=True))
        self._file.write(json.dumps(decision) + "\n")


@contextmanager
def logged_decisions(path: Path) -> Iterator[None]:
    """Writes a line for each pass whose number of draft nodes is decided within the body.

    It holds the tokens a row of the pass (`pass_tokens`), how long it took and the new tokens of
    all rows; then the `sizes` that were considered, tokens a row each, and the new tokens and
    seconds that were expected of them (`null` for new tokens where nothing was drafted).
    """
    level, propagate = budget.logger.level, budget.logger.propagate
    with path.open("w", encoding="utf-8") as file:
        handler = _JsonLines(file)
        budget.logger.addHandler(handler)
        budget.logger.setLevel(logging.DEBUG)
        budget.logger.propagate = False
        try:
            yield
        finally:
            budget.logger.setLevel(level)
            budget.logger.propagate = propagate
            budget.logger.removeHandler(handler)
