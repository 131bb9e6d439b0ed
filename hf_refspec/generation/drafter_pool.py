"""One drafter for calls that may run in several threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..drafting.drafter import Drafter


class DrafterPool:
    """A drafter and, while a call has it, forks for further calls; what they learn they share as
    [`Drafter.fork`] says.

    Args:
        drafter ([`Drafter`]): No call may have it now.
    """

    def __init__(self, drafter: Drafter) -> None:
        self._idle = [drafter]
        self._unused = drafter.fork()  # a drafter that a call has cannot be forked

    @contextmanager
    def drafter(self) -> Iterator[Drafter]:
        """A drafter that no other call has."""
        try:
            drafter = self._idle.pop()
        except IndexError:
            drafter = self._unused.fork()
        try:
            yield drafter
        finally:
            self._idle.append(drafter)
