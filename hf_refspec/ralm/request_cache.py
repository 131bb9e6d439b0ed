"""The ids that a request speculates from, and what a retriever keeps for the next request."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np

from .options import RalmSpeculation
from .os3 import PublishedGamma, Scheduler, StrideScheduler, WaitingScheduler

# Ids that a request cache holds: scoring more takes longer than the search that a guess saves.
MOST_CACHED = 1 << 14
# The part of a search and of a step that scoring the ids of earlier requests may take.
EARLIER_COST = 0.05
# The entry of a retriever's `__dict__` that keeps what was learned of it.
LEARNED = "_learned_by_speculation"
NO_IDS = np.empty(0, dtype=np.int64)


class RequestCache:
    """The ids from which a request speculates (section 3): what it retrieved, and `earlier` ids
    (int64, `(n,)`, the newest first). Beyond `limit` the oldest are dropped, but no id of the last
    addition.

    Attributes:
        ids (`np.ndarray`, int64 of shape `(n,)`): All ids, ascending.
        newest_first (`np.ndarray`, int64 of shape `(n,)`): The same ids.
    """

    def __init__(self, limit: int = MOST_CACHED, earlier: np.ndarray = NO_IDS) -> None:
        self._limit = limit
        self.newest_first = earlier
        self.ids = np.sort(earlier)

    def add(self, ids: np.ndarray) -> None:
        """Adds retrieved ids (int64 of shape `(m,)`, with repetitions)."""
        added = np.unique(ids)
        older = self.newest_first[~np.isin(self.newest_first, added, assume_unique=True)]
        self.newest_first = np.concatenate([added, older])[: max(self._limit, len(added))]
        self.ids = np.sort(self.newest_first)


class Learned(dict[tuple, tuple[Scheduler, np.ndarray]]):
    """Schedulers and retrieved ids (the newest first) of a retriever's calls, by setting.

    An entry is replaced, never changed, so that threads can share it. A deep copy or pickle of the
    retriever begins with nothing.
    """

    def __reduce__(self) -> tuple[type[Learned], tuple]:
        return Learned, ()

    @classmethod
    def for_retriever(cls, retriever: Any, speculation: RalmSpeculation) -> Learned:
        """What the retriever keeps; an empty one, for this request alone, as published or if the
        retriever cannot keep it."""
        if speculation.max_gamma is not None or not hasattr(retriever, "__dict__"):
            return cls()
        learned: Learned = vars(retriever).setdefault(LEARNED, cls())
        return learned

    def begin(
        self, setting: tuple, retriever: Any, speculation: RalmSpeculation
    ) -> tuple[Scheduler, np.ndarray]:
        """The scheduler and the ids that a request begins with."""
        scheduler, ids = self.get(setting, (None, NO_IDS))
        return deepcopy(scheduler) or _new_scheduler(retriever, speculation), ids

    def end(
        self, setting: tuple, scheduler: Scheduler, retrieved: np.ndarray, earlier: np.ndarray
    ) -> None:
        """Keeps the scheduler of a request that began with the ids `earlier` (int64, `(n,)`), and
        the ids `retrieved` (int64, `(m,)`, the newest first), then the ids of requests that have
        ended meanwhile."""
        _, now = self.get(setting, (None, NO_IDS))
        others = now[~(np.isin(now, earlier) | np.isin(now, retrieved))]
        measured = scheduler.measured
        seconds = EARLIER_COST * min(measured.search(1), measured.step)
        scored_in_time = int(len(retrieved) * seconds / max(measured.guess, 1e-9))
        limit = min(MOST_CACHED, scored_in_time)
        self[setting] = scheduler, np.concatenate([retrieved, others])[:limit]


def _new_scheduler(retriever: Any, speculation: RalmSpeculation) -> Scheduler:
    if speculation.max_gamma is not None:
        gamma = PublishedGamma(speculation.max_gamma)
        return StrideScheduler(gamma, speculation.asynchronous)
    exact = getattr(retriever, "index", None) == "flat"
    return WaitingScheduler(speculation.asynchronous, exact)
