"""The sources of guesses, and their measured costs and errors.

The paper has one source, the request cache. A kNN datastore with a PQ index has another: it looks
at all entries, which takes longer and is more often right. The index is used while the time that it
adds to a step is less than what it saves: a search for each mistake that it avoids.
"""

from __future__ import annotations

from statistics import median

from .gamma import Gamma, GammaByLag, PublishedGamma
from .options import Speculation
from .os3 import SearchSeconds, StrideScheduler

_PRIOR_RIGHT = 16  # pseudo-count of each source's right guesses: a first mistake decides nothing


class GuessSource:
    """A source of guesses. What it was in an earlier request counts half."""

    def __init__(self, scheduler: StrideScheduler, earlier: GuessSource | None = None) -> None:
        self.scheduler = scheduler
        self._right: float = earlier._right / 2 if earlier else 0.0
        self._wrong: float = earlier._wrong / 2 if earlier else 0.0
        self._guess_seconds: list[float] = []

    @property
    def is_timed(self) -> bool:
        return bool(self._guess_seconds)

    @property
    def guess_seconds(self) -> float:
        return median(self._guess_seconds)

    @property
    def wrong(self) -> float:
        """The fraction of its guesses that are wrong."""
        return self._wrong / (self._right + self._wrong + _PRIOR_RIGHT)

    def record_guess(self, seconds: float) -> None:
        self._guess_seconds.append(seconds)

    def record(self, lags: list[int], right: int) -> None:
        """Adds those of its steps that were verified, see [`PublishedGamma.record`]."""
        if lags:
            self.scheduler.gamma.record(lags, right)
            self._right += right
            self._wrong += len(lags) - right


class Estimates:
    """What a request measures of a retriever and of each source of guesses.

    It begins with that of an earlier request, which stays as it is. The request cache is the first
    of the `sources`.
    """

    def __init__(
        self, speculation: Speculation, sources: int, earlier: Estimates | None = None
    ) -> None:
        steps_ahead = speculation.steps_ahead if speculation.asynchronous else 0
        searches = earlier.search_seconds.samples if earlier else []
        self.search_seconds: SearchSeconds = SearchSeconds(searches)
        self.sources: list[GuessSource] = []
        for before in earlier.sources if earlier else [None] * sources:
            scheduler = StrideScheduler(
                _gamma(speculation, before),
                self.search_seconds,
                steps_ahead,
                before.scheduler.step_samples if before else (),
            )
            self.sources.append(GuessSource(scheduler, before))

    def choose(self) -> GuessSource:
        """The source to speculate with until the next verification. Each is timed once first."""
        for source in self.sources:
            if not source.is_timed or len(self.sources) == 1:
                return source
        cache, index = self.sources
        added = index.guess_seconds - cache.guess_seconds
        saved = (cache.wrong - index.wrong) * self.search_seconds(1)
        return index if added < saved else cache


def _gamma(speculation: Speculation, before: GuessSource | None) -> Gamma:
    if speculation.max_gamma is not None:
        return PublishedGamma(speculation.window, speculation.max_gamma)
    if before is None:
        return GammaByLag(speculation.window)
    assert isinstance(before.scheduler.gamma, GammaByLag)  # nothing else is left to a request
    return GammaByLag(speculation.window, before.scheduler.gamma.remembered())
