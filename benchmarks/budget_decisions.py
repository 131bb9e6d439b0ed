"""Logs the decisions of automatic draft budgets during a run of `hf-refspec bench`, as JSON lines.

    python benchmarks/budget_decisions.py FILE SUITE... --nodes auto --methods METHOD ...

takes the arguments of `hf-refspec bench` after the new FILE. With one method, each line belongs to
one pass of it: the prompt's `name`, the tokens of a row of the pass (`pass_tokens`), its `seconds`
and the `new_tokens` of all rows; then the `sizes` that were considered, in tokens of a row, and the
`expected_tokens` and `expected_seconds` of each (`null` tokens where nothing was drafted).
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

from hf_refspec.apps.bench.measure import Bench
from hf_refspec.apps.cli.main import main as hf_refspec
from hf_refspec.generation import budget

NAMES = ("pass_tokens", "seconds", "new_tokens", "sizes", "expected_tokens", "expected_seconds")


class DecisionLog(logging.Handler):
    """Keeps the decisions of each prompt, and writes them when it is done, so that writing takes
    none of the time that is measured."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._decisions: list[tuple[Any, ...]] = []

    def emit(self, record: logging.LogRecord) -> None:
        assert isinstance(record.args, tuple)
        self._decisions.append(record.args)

    def write(self, name: str) -> None:
        """Writes the decisions for a prompt."""
        with self._path.open("a", encoding="utf-8") as file:
            for args in self._decisions:
                decision = dict(zip(NAMES, args, strict=True))
                file.write(json.dumps({"name": name, **decision}) + "\n")
        self._decisions.clear()


def main(arguments: list[str]) -> int:
    """Runs the bench with a log in a new file."""
    path, *others = arguments
    Path(path).touch(exist_ok=False)
    log, measure = DecisionLog(Path(path)), Bench.measure

    def logged(bench: Bench, name: str, *args: Any, **kwargs: Any) -> Any:
        log._decisions.clear()  # of the warm-up
        measured = measure(bench, name, *args, **kwargs)
        log.write(name)
        return measured

    level, propagate = budget.logger.level, budget.logger.propagate
    budget.logger.addHandler(log)
    budget.logger.setLevel(logging.DEBUG)
    budget.logger.propagate = False
    Bench.measure = logged
    try:
        return hf_refspec(["bench", *others])
    finally:
        Bench.measure = measure
        budget.logger.removeHandler(log)
        budget.logger.setLevel(level)
        budget.logger.propagate = propagate


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
