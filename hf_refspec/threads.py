"""A function of many items, computed in threads, in order and in little memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
Item = TypeVar("Item")


def map_in_order(
    function: Callable[[Item], T], items: Iterable[Item], threads: int
) -> Generator[T, None, None]:
    """Yields the result of each item; a few items are read ahead.

    The threads end with the generator."""
    pool = ThreadPoolExecutor(threads)
    pending: deque[Future[T]] = deque()
    try:
        for item in items:
            pending.append(pool.submit(function, item))
            if len(pending) > 2 * threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
