"""Work that is begun ahead of its turn, by threads or by Ray."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

W = TypeVar("W")
P = TypeVar("P")


def in_order(
    work: Iterable[W], begin: Callable[[W], P], ahead: int, cancel: Callable[[P], object]
) -> Generator[P, None, None]:
    """Begins up to `ahead` pieces of work early and yields what `begin` returned in their order;
    calls `cancel` with what is left when it is closed."""
    begun: deque[P] = deque()
    try:
        for piece in work:
            begun.append(begin(piece))
            del piece  # it may be large, and is not needed here any more
            if len(begun) > ahead:
                yield begun[0]
                begun.popleft()
        while begun:
            yield begun[0]
            begun.popleft()
    finally:
        for promise in begun:
            cancel(promise)
