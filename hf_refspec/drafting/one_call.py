"""A drafter serves one call at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from .sampling import Sampling
from .stats import SpeculationStats

if TYPE_CHECKING:
    from typing_extensions import Self


class OneCall:
    """Begins and ends calls, and refuses a second one meanwhile."""

    sampling: Sampling | None = None
    stats: SpeculationStats
    _in_use: threading.Lock

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        # Not in __init__: a subclass may forget to call it, and copies and pickles do not call it.
        drafter = super().__new__(cls)
        drafter._in_use = threading.Lock()
        return drafter

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_in_use"}

    def begin(self, prompt_ids: np.ndarray, vocab_size: int) -> None: ...

    def end(self) -> None: ...

    def fork(self) -> Self:
        raise NotImplementedError

    @contextmanager
    def session(
        self, prompt_ids: np.ndarray, vocab_size: int, sampling: Sampling | None = None
    ) -> Iterator[None]:
        """One call with a single row, see [`~Drafter.sessions`]."""
        with self.sessions([prompt_ids], vocab_size, sampling):
            yield

    @contextmanager
    def sessions(
        self, prompts: Sequence[np.ndarray], vocab_size: int, sampling: Sampling | None = None
    ) -> Iterator[list[Self]]:
        """One call, from `begin` to `end`, with fresh `stats`: this drafter drafts for the first
        row, a fork for each other.

        Args:
            prompts (sequence of `np.ndarray`): The prompt of each row, as `begin` takes it.
            vocab_size (`int`): The target model's.
            sampling ([`Sampling`], *optional*): How the call samples; `None` if it is greedy.

        Raises:
            RuntimeError: if another call is using this drafter.
        """
        with self._owned(), ExitStack() as rows:
            drafters = [self, *(self.fork() for _ in prompts[1:])]
            for drafter, prompt_ids in zip(drafters, prompts, strict=True):
                drafter.sampling = sampling
                rows.enter_context(drafter._begun(prompt_ids, vocab_size))
            yield drafters

    @contextmanager
    def _begun(self, prompt_ids: np.ndarray, vocab_size: int) -> Iterator[None]:
        self.stats = SpeculationStats()
        try:
            self.begin(prompt_ids, vocab_size)
            yield
        finally:
            self.end()

    @contextmanager
    def _owned(self) -> Iterator[None]:
        if not self._in_use.acquire(blocking=False):
            raise RuntimeError(
                f"this {type(self).__name__} is in use by another call; make one drafter per "
                "thread, or fork() it"
            )
        try:
            yield
        finally:
            self._in_use.release()
