"""Prefetching: how many passages of each search the request cache takes (RaLMSpec, "P")."""

from __future__ import annotations

from collections import deque

DEFAULT_PREFETCH = 20
MOST_PREFETCHED = 128
_WINDOW = 32


class AutoPrefetch:
    """Doubles or halves the number by what the lower half of the passages brings and costs.

    It brings a right speculation wherever the passage that is asked for came in with a rank in the
    lower half, and so saves a mismatch. It costs half of the time in the cache.

    Attributes:
        count (`int`): How many passages to take now.
    """

    def __init__(self) -> None:
        self.count = DEFAULT_PREFETCH
        self._ranks: deque[int | None] = deque(maxlen=_WINDOW)
        self._cache_seconds: deque[float] = deque(maxlen=_WINDOW)

    def record(self, rank: int | None, cache_seconds: float, mismatch_seconds: float) -> None:
        """Adds a verified step.

        Args:
            rank (`int`, *optional*): Of the true passage in the search that first brought it,
                `None` if none had.
            cache_seconds (`float`): What the cache took for the step.
            mismatch_seconds (`float`): What a mismatch costs: a step and a verification.
        """
        self._ranks.append(rank)
        self._cache_seconds.append(cache_seconds)
        if len(self._ranks) < _WINDOW:
            return
        from_lower_half = sum(rank is not None and rank >= self.count // 2 for rank in self._ranks)
        missing = any(rank is None for rank in self._ranks)
        brought = from_lower_half * mismatch_seconds
        cost = sum(self._cache_seconds) / 2
        if brought < cost and self.count > 1:
            self._set(self.count // 2)
        # Twice as many cost as much again, and bring less than the last ones.
        elif missing and brought > 4 * cost and self.count < MOST_PREFETCHED:
            self._set(min(2 * self.count, MOST_PREFETCHED))

    def _set(self, count: int) -> None:
        self.count = count
        self._ranks.clear()
        self._cache_seconds.clear()
