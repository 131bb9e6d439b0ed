"""The decisions of automatic draft budgets, as JSON lines."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...generation import budget

NAMES = ("pass_tokens", "seconds", "new_tokens", "sizes", "expected_tokens", "expected_seconds")


class DecisionLog(logging.Handler):
    """Writes a line for each pass whose number of draft nodes is decided within `of`.

    It holds the tokens a row of the pass (`pass_tokens`), how long it took and the new tokens of
    all rows; then the `sizes` that were considered, tokens a row each, and the new tokens and
    seconds that were expected of them (`null` for new tokens where nothing was drafted).

    Args:
        path (`Path`): A new file.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._noted: list[tuple[Any, ...]] = []

    def emit(self, record: logging.LogRecord) -> None:
        assert isinstance(record.args, tuple)
        self._noted.append(record.args)

    @contextmanager
    def of(self, **about: Any) -> Iterator[None]:
        """Logs what is decided in the body; each line says what it is `about`. It is written at the
        end, so that writing takes none of the time that is measured."""
        level, propagate = budget.logger.level, budget.logger.propagate
        budget.logger.addHandler(self)
        budget.logger.setLevel(logging.DEBUG)
        budget.logger.propagate = False
        try:
            yield
        finally:
            budget.logger.setLevel(level)
            budget.logger.propagate = propagate
            budget.logger.removeHandler(self)
            with self._path.open("a", encoding="utf-8") as file:
                for args in self._noted:
                    decision = dict(zip(NAMES, args, strict=True))
                    file.write(json.dumps(about | decision) + "\n")
            self._noted.clear()
