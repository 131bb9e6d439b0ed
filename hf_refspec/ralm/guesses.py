"""The sources of guesses, and their measured costs and errors.

The paper has one source, the request cache. A kNN datastore with a PQ index has another: it looks
at all entries, which takes longer and is more often right. The index is used while the time that it
adds to a step is less than what it saves: a search for each mistake that it avoids.
"""

from __future__ import annotations

from copy import deepcopy
from statistics import median

from .gamma import Gamma, GammaByLag, PublishedGamma
from .options import Speculation
from .os3 import SearchSeconds, StrideScheduler

_PRIOR_RIGHT = 16  # pseudo-count of each source's right guesses: a first mistake decides nothing


class GuessSource:
    """A source of guesses. What it was in an earlier request counts half."""

    def __init__(self, scheduler: StrideScheduler) -> None:
        self.scheduler = scheduler
        self._right = self._wrong = 0.0
        self.guess_seconds: list[float] = []

    def begin_request(self) -> None:
        """Begins another request of the same retriever."""
        self.scheduler.begin_request()
        self._right, self._wrong = self._right / 2, self._wrong / 2
        self.guess_seconds.clear()

    @property
    def wrong(self) -> float:
        """The fraction of its guesses that are wrong."""
        return self._wrong / (self._right + self._wrong + _PRIOR_RIGHT)

    def record(self, lags: list[int], right: int) -> None:
        """Adds those of its steps that were verified, see [`PublishedGamma.record`]."""
        if lags:
            self.scheduler.gamma.record(lags, right)
            self._right += right
            self._wrong += len(lags) - right


class Estimates:
    """What a request measures of a retriever and of each source of guesses. The request cache is
    the first of the `sources`."""

    def __init__(self, speculation: Speculation, sources: int) -> None:
        steps_ahead = speculation.steps_ahead if speculation.asynchronous else 0
        self.search_seconds = SearchSeconds()
        self.sources: list[GuessSource] = []
        for _ in range(sources):
            capped = speculation.max_gamma
            gamma: Gamma = GammaByLag() if capped is None else PublishedGamma(capped)
            scheduler = StrideScheduler(gamma, self.search_seconds, steps_ahead)
            self.sources.append(GuessSource(scheduler))

    def for_next_request(self) -> Estimates:
        """A copy for another request of the same retriever to begin with."""
        estimates = deepcopy(self)
        for source in estimates.sources:
            source.begin_request()
        return estimates

    def choose(self) -> GuessSource:
        """The source to speculate with until the next verification. Each is timed once first."""
        for source in self.sources:
            if not source.guess_seconds or len(self.sources) == 1:
                return source
        cache, index = self.sources
        added = median(index.guess_seconds) - median(cache.guess_seconds)
        saved = (cache.wrong - index.wrong) * self.search_seconds(1)
        return index if added < saved else cache
