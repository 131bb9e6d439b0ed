"""The line in which visitors wait: one race runs at a time, in the order in which they came."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import ceil

from .race import Race


class Line:
    """The races that wait, behind the one that runs."""

    def __init__(self) -> None:
        self._races: list[Race] = []  # the first one runs
        self._pace: float | None = None  # of the latest race that has one

    @contextmanager
    def place(self, race: Race) -> Iterator[None]:
        """Holds the last place for a race, until it has run."""
        self._races.append(race)
        try:
            yield
        finally:
            self._races.remove(race)

    def wait(self, race: Race) -> str:
        """What a race waits for, and how long at most; empty when it is its turn."""
        before = self._races[: self._races.index(race)]
        if not before:
            return ""
        self._pace = before[0].pace or self._pace
        answers = f"{len(before)} answers come" if len(before) > 1 else "1 answer comes"
        if self._pace is None:
            return f"{answers} before yours."
        seconds = sum(each.seconds_left(self._pace) for each in before)
        return f"{answers} before yours: about {max(1, ceil(seconds))} s at most."
