"""What speculated steps retrieve from, and what is known of it.

The paper has one source of guesses, the request cache. A kNN datastore with a PQ index has another:
it looks at all entries, which takes longer and is more often right. Every request takes one step
with each source, to time it. From then on the source with the higher expected rate of verified
steps (OS3's objective) is used. What has not been seen to be wrong is expected to be right
(`gamma.py`), so that the index is used as soon as the cache's mistakes cost more than its scans.
"""

from __future__ import annotations

from .gamma import Gamma, GammaByLag, PublishedGamma
from .options import Speculation
from .os3 import SearchSeconds, StrideScheduler


class Estimates:
    """What is known of a retriever, and of each source of guesses at what it finds.

    Args:
        speculation ([`Speculation`]): The options.
        sources (`int`): How many sources there are.
        earlier ([`Estimates`], *optional*): Of an earlier request of the same retriever with as
            many sources, to begin with; they stay as they are.

    Attributes:
        search_seconds ([`SearchSeconds`]): What searches take.
        sources (`list[StrideScheduler]`): For each source, what its steps take and how often they
            are right. One or more.
    """

    def __init__(
        self, speculation: Speculation, sources: int, earlier: Estimates | None = None
    ) -> None:
        self._stride = None if speculation.stride == "os3" else int(speculation.stride)
        steps_ahead = speculation.steps_ahead if speculation.asynchronous else 0
        self.search_seconds = SearchSeconds(earlier.search_seconds.samples if earlier else ())
        self.sources = [
            StrideScheduler(
                _gamma(speculation, before),
                self.search_seconds,
                steps_ahead,
                before.step_samples if before else (),
            )
            for before in (earlier.sources if earlier else [None] * sources)
        ]

    def choose(self) -> StrideScheduler:
        """Which source to speculate with until the next verification."""
        if len(self.sources) == 1:
            return self.sources[0]
        untimed = (source for source in self.sources if not source.is_timed)
        return next(untimed, None) or max(self.sources, key=lambda each: each.rate(self._stride))


def _gamma(speculation: Speculation, before: StrideScheduler | None) -> Gamma:
    if speculation.max_gamma is not None:
        return PublishedGamma(speculation.window, speculation.max_gamma)
    if before is None:
        return GammaByLag(speculation.window)
    assert isinstance(before.gamma, GammaByLag)  # nothing else is left to a request
    return GammaByLag(speculation.window, before.gamma.remembered())
