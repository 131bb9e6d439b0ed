"""How long a request may keep the engine's thread with its grammar."""

from __future__ import annotations

from collections.abc import Callable
from time import thread_time
from typing import Any

import torch
from transformers import LogitsProcessor

_SECONDS, _SECONDS_A_TOKEN = 1.0, 0.01  # ordinary grammars take a millisecond for each token


class GrammarTooSlow(Exception):
    """A request has spent its budget."""


class GrammarBudget:
    """The time that masks and drafts of a request's grammar may take, for all of its rows together:
    a second, and 10 ms for each token. It counts what `with` encloses, and may be exceeded by one
    step of the grammar, which nothing interrupts.

    Args:
        clock: By default it counts only what this thread computes, however busy the machine is.
    """

    def __init__(self, clock: Callable[[], float] = thread_time) -> None:
        self._clock = clock
        self._left = _SECONDS
        self._began: float | None = None  # None while nothing is counted

    def add_token(self) -> None:
        self._left += _SECONDS_A_TOKEN

    def is_spent(self) -> bool:
        running = 0.0 if self._began is None else self._clock() - self._began
        return self._left < running

    def __enter__(self) -> None:
        self._began = self._clock()

    def __exit__(self, *error: Any) -> None:
        if self._began is not None:
            self._left -= self._clock() - self._began
        self._began = None


class BudgetedProcessor(LogitsProcessor):
    """A grammar's processor, which raises `GrammarTooSlow` when the budget is spent."""

    def __init__(self, processor: LogitsProcessor, budget: GrammarBudget) -> None:
        self._processor, self._budget = processor, budget

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        self._budget.add_token()
        if self._budget.is_spent():
            raise GrammarTooSlow
        with self._budget:
            return self._processor(input_ids, scores)
