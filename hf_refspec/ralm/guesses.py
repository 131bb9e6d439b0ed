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

    def record(self, lags: Sequence[int], right: int) -> None:
        """Adds those of its steps that a verification got to, see [`PublishedGamma.record`]."""
        if lags:
            self.scheduler.gamma.record(lags, right)
            self.verified += len(lags)


class Estimates:
    """What is known of a retriever, and of each source of guesses at what it finds.

    Args:
        speculation ([`Speculation`]): The options.
        sources (`int`): How many sources there are.
        earlier ([`Estimates`], *optional*): Of an earlier request of the same retriever with as
            many sources, to begin with; they stay as they are.

    Attributes:
        search_seconds ([`SearchSeconds`]): What searches take.
        sources (`list[GuessSource]`): One or more.
    """

    def __init__(
        self, speculation: Speculation, sources: int, earlier: Estimates | None = None
    ) -> None:
        self._stride = None if speculation.stride == "os3" else int(speculation.stride)
        self._choices: int = earlier._choices if earlier else 0
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
            self.sources.append(GuessSource(scheduler, before.verified if before else 0))

    def choose(self) -> GuessSource:
        """Which source to speculate with until the next verification."""
        if len(self.sources) == 1:
            return self.sources[0]
        self._choices += 1
        untried = min(self.sources, key=lambda source: source.verified)
        if untried.verified < _TRIAL_STEPS:
            return untried
        pick = min if self._choices % _RETRIED_EVERY == 0 else max
        return pick(self.sources, key=lambda source: source.scheduler.rate(self._stride))


def _gamma(speculation: Speculation, before: GuessSource | None) -> Gamma:
    if speculation.max_gamma is not None:
        return PublishedGamma(speculation.window, speculation.max_gamma)
    if before is None:
        return GammaByLag(speculation.window)
    assert isinstance(before.scheduler.gamma, GammaByLag)  # nothing else is left to a request
    return GammaByLag(speculation.window, before.scheduler.gamma.remembered())
