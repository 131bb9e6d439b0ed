"""What speculated steps retrieve from, and what is known of it.

The paper has one source of guesses, the request cache. A kNN datastore with a PQ index has another:
it looks at all entries, which takes longer and is more often right. Each source has its own
estimates of how often it is right and of what a step with it takes. The one with which OS3's
objective, the expected number of verified steps per second, is larger is used: the PQ index where
mistakes cost more than it does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .gamma import Gamma, GammaByLag, PublishedGamma
from .options import Speculation
from .os3 import SearchSeconds, StrideScheduler

# Of how many steps of each source the outcome must be known before one of them is preferred, and
# every which verification then goes to the other, whose estimates would never change otherwise.
_TRIAL_STEPS, _RETRIED_EVERY = 16, 32


@dataclass(slots=True)
class GuessSource:
    """A source of guesses.

    Attributes:
        scheduler ([`StrideScheduler`]): What its steps take, and how often they are right.
        verified (`int`): How many of its steps verifications have got to.
    """

    scheduler: StrideScheduler
    verified: int = 0

    @property
    def gamma(self) -> Gamma:
        return self.scheduler.gamma

    def record(self, lags: Sequence[int], right: int) -> None:
        """Adds those of its steps that a verification got to, see [`Gamma.record`]."""
        if lags:
            self.gamma.record(lags, right)
            self.verified += len(lags)


@dataclass(frozen=True)
class History:
    """What a request leaves to the next one of the same retriever.

    Attributes:
        searches (`list[tuple[int, float]]`): See [`SearchSeconds.samples`].
        sources (`list[tuple]`): Of each source what [`GammaByLag.remembered`] returns, its
            [`StrideScheduler.step_samples`], and how many of its steps were verified.
    """

    searches: list[tuple[int, float]]
    sources: list[tuple[np.ndarray | None, list[float], int]]


class Estimates:
    """What is known of a retriever and of each source of guesses at what it finds.

    Args:
        speculation ([`Speculation`]): The options.
        sources (`int`): How many sources there are.
        history ([`History`], *optional*): What an earlier request has left.

    Attributes:
        search_seconds ([`SearchSeconds`]): What searches take.
        sources (`list[GuessSource]`): One or more.
    """

    def __init__(self, speculation: Speculation, sources: int, history: History | None) -> None:
        self._stride = None if speculation.stride == "os3" else int(speculation.stride)
        history = history or History([], [(None, [], 0)] * sources)
        self.search_seconds = SearchSeconds(history.searches)
        self.sources: list[GuessSource] = []
        for right, step_samples, verified in history.sources:
            gamma: Gamma
            if speculation.max_gamma is None:
                gamma = GammaByLag(speculation.window, right)
            else:
                gamma = PublishedGamma(speculation.window, speculation.max_gamma)
            steps_ahead = speculation.steps_ahead if speculation.asynchronous else 0
            scheduler = StrideScheduler(gamma, self.search_seconds, steps_ahead, step_samples)
            self.sources.append(GuessSource(scheduler, verified))

    def choose(self, verifications: int) -> int:
        """Which source to speculate with next, after that many verifications."""
        tried = [source.verified for source in self.sources]
        if min(tried) < _TRIAL_STEPS:
            return int(np.argmin(tried))
        rates = [source.scheduler.rate(self._stride) for source in self.sources]
        is_retrial = (verifications + 1) % _RETRIED_EVERY == 0
        return int(np.argmin(rates) if is_retrial else np.argmax(rates))

    def history(self) -> History:
        """What to leave to the next request."""
        return History(
            self.search_seconds.samples,
            [
                (_remembered(source.gamma), source.scheduler.step_samples, source.verified)
                for source in self.sources
            ],
        )


def _remembered(gamma: Any) -> np.ndarray | None:
    return gamma.remembered() if isinstance(gamma, GammaByLag) else None
