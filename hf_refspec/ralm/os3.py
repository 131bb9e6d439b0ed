"""The stride scheduler: how many steps to speculate before they are verified.

The optimal speculation stride (OS3; RaLMSpec, arXiv 2401.14021, section 4) maximises the expected
number of verified steps per second, given the measured cost of a step and of a verification, and
gamma, the probability that a speculated step is right.

The paper always speculates: `StrideScheduler`. `WaitingScheduler` does not where waiting is faster.
"""

from __future__ import annotations

from collections import deque
from statistics import fmean, median
from typing import Any, TypeAlias

import numpy as np

LONGEST_STRIDE = 32  # steps that one search verifies
_STRIDES = np.arange(1, LONGEST_STRIDE + 1)
_PUBLISHED_WINDOW = 5  # verifications that the paper's gamma is estimated from (w)
# Our gamma: pseudo-counts of right and wrong steps, the factor by which each verification reduces
# earlier counts, and by how many deviations gamma is taken lower where a wrong guess costs time.
_PRIOR_RIGHT = 3.0
_PRIOR_WRONG = 0.3
_PRIOR_WRONG_FIRST = 3.0  # earlier requests may say nothing about a first guess
_FADING = 0.95
_DEVIATIONS = 3.0
# Costs are estimated from the last searches and the last steps.
_SEARCH_SAMPLES = 24
_STEP_SAMPLES = 16
# The time that each further query adds, in searches for one query, until batches of two sizes were
# measured. An exact search reads its vectors for several queries at once.
_PER_QUERY = 0.75
_PER_QUERY_EXACT = 0.25
# Steps with and without a concurrent search before contention is estimated. Single steps differ too
# much, since some begin with another passage.
_CONTENTION_SAMPLES = 3
_MOST_CONTENTION = 4.0  # from 2 on, a step during a search saves nothing
# The next request begins with this part of what was measured beyond the expected contention. Other
# work may have caused it, but each new try costs several slow steps.
_CONTENTION_KEPT = 0.9
_LEARNING_COST = 0.01  # of a step, for a guess from which no step is generated


class PublishedGamma:
    """The paper's gamma: maximum likelihood over the last verifications, at most `limit`."""

    def __init__(self, limit: float) -> None:
        self._window: deque[tuple[int, int]] = deque(maxlen=_PUBLISHED_WINDOW)
        self._limit = limit

    def record(self, right: int, wrong: bool) -> None:
        """Adds a verification: how many steps were right, and whether the next one was wrong."""
        self._window.append((right, right + wrong))

    @property
    def likely(self) -> float:
        """The probability, below 1, that a step is right if those before it are."""
        right = sum(right for right, _ in self._window)
        steps = sum(steps for _, steps in self._window)
        return min(right / max(steps, 1), self._limit)


class Gamma:
    """Our gamma, from all verifications of a retriever; the last ones count most."""

    def __init__(self, prior_wrong: float = _PRIOR_WRONG) -> None:
        self._right = 0.0
        self._steps = 0.0
        self._prior_steps = _PRIOR_RIGHT + prior_wrong

    def record(self, right: int, wrong: bool) -> None:
        self._right = _FADING * self._right + right
        self._steps = _FADING * self._steps + right + wrong

    @property
    def likely(self) -> float:
        return (self._right + _PRIOR_RIGHT) / (self._steps + self._prior_steps)

    @property
    def at_least(self) -> float:
        """A cautious `likely`: several standard deviations lower."""
        steps = self._steps + self._prior_steps + 1
        deviation = (self.likely * (1 - self.likely) / steps) ** 0.5
        return max(self.likely - _DEVIATIONS * deviation, 0.0)


def expected_rates(
    gamma: float, step_seconds: float, search_seconds: np.ndarray, saved_seconds: np.ndarray | float
) -> np.ndarray:
    """The paper's objective, verified steps per second, for the strides 1 to n: float64 `(n,)`.

    A step takes `step_seconds` (a), and a verification of 1 to n steps `search_seconds` (b). Steps
    generated meanwhile save some: in the paper `min(a, b)` whenever all steps are right."""
    strides = np.arange(1, len(search_seconds) + 1)
    # The steps before the first wrong one, and that one, which is repeated with the truth.
    steps = (1 - gamma**strides) / (1 - gamma)
    return steps / (step_seconds * strides + search_seconds - saved_seconds)


class SearchSeconds:
    """The time of a search, `b0 + b1 * batch`, fitted to the last searches.

    The slope is the median slope between any two of them with batches of different sizes
    (Theil-Sen), so that a disturbed search, as the first one often is, does not count. Before sizes
    differ, b1 is the `fraction` of a search for one query."""

    def __init__(self, fraction: float = 0.0) -> None:
        self._samples: deque[tuple[int, float]] = deque(maxlen=_SEARCH_SAMPLES)
        self._fraction = fraction
        self.fixed = self.per_query = 0.0

    def __call__(self, batch: Any) -> Any:
        """The expected seconds of a search for `batch` queries (`int` or int array)."""
        return self.fixed + self.per_query * batch

    def record(self, batch: int, seconds: float) -> None:
        self._samples.append((batch, seconds))
        batches, times = np.array(self._samples).T
        first, second = np.triu_indices(len(batches), 1)  # all pairs of searches
        differ = batches[first] != batches[second]
        slopes = (times[second] - times[first])[differ] / (batches[second] - batches[first])[differ]
        if not len(slopes):
            slopes = self._fraction * times / (1 + self._fraction * (batches - 1))
        self.per_query = max(float(np.median(slopes)), 0.0)
        self.fixed = max(float(np.median(times - self.per_query * batches)), 0.0)
        self._fraction = self.per_query / max(self(1), 1e-9)  # for a window of equal batches


class Measured:
    """The measured times of steps, guesses and verifications.

    A step and a search slow each other down at most `most_contention` times, in the paper never."""

    def __init__(self, per_query: float = 0.0, most_contention: float = 1.0) -> None:
        self.search = SearchSeconds(per_query)
        self.guesses: deque[float] = deque(maxlen=_STEP_SAMPLES)
        # Seconds of verifications, without searches and the steps meanwhile.
        self.overheads: deque[float] = deque(maxlen=_STEP_SAMPLES)
        # Seconds of steps without and with a concurrent search.
        self._alone: deque[float] = deque(maxlen=_STEP_SAMPLES)
        self._meanwhile: deque[float] = deque(maxlen=_STEP_SAMPLES)
        self._most_contention = most_contention
        self._expected_contention = 1.0
        self._unexpected_contention = 0.0
        self._with_prompt = 0.0  # the last request's first step

    def begin_request(self, expected_contention: float = 1.0) -> None:
        """Begins another request of the same retriever, perhaps with another model."""
        self._alone.clear()
        self._meanwhile.clear()
        self.overheads.clear()
        self._expected_contention = expected_contention
        self._unexpected_contention *= _CONTENTION_KEPT

    @property
    def contention(self) -> float:
        """The factor by which a step takes longer while a search runs, and the search as well."""
        expected = self._expected_contention + self._unexpected_contention
        return min(max(expected, 1.0), self._most_contention)

    @property
    def step(self) -> float:
        """Mean seconds of a step that runs alone, 0 before the first one."""
        steps = [*self._alone, *(seconds / self.contention for seconds in self._meanwhile)]
        return fmean(steps or [self._with_prompt])

    @property
    def guess(self) -> float:
        return median(self.guesses or [0.0])

    def verification(self, batch: Any) -> Any:
        """The expected seconds of a search for `batch` queries and of all that follows it."""
        return self.search(batch) + median(self.overheads or [0.0])

    def record_step(self, seconds: float, meanwhile: bool, first: bool = False) -> None:
        """Adds a step without its guess, `meanwhile` a search ran or not; `first` of the text."""
        if first:
            self._with_prompt = seconds / (self.contention if meanwhile else 1.0)
            return
        (self._meanwhile if meanwhile else self._alone).append(seconds)
        if min(len(self._alone), len(self._meanwhile)) >= _CONTENTION_SAMPLES:
            # A ratio of medians, since a step that begins with another passage takes far longer.
            slower = max(median(self._meanwhile) / median(self._alone), 1.0)
            self._unexpected_contention = slower - self._expected_contention

    def record_search(self, batch: int, seconds: float, busy_seconds: float) -> None:
        """Adds a search, during which steps ran for `busy_seconds`."""
        slowed = min(busy_seconds, seconds) * (1 - 1 / self.contention)
        self.search.record(batch, seconds - slowed)


class StrideScheduler:
    """Chooses the stride, the number of queries of a search, as in the paper.

    Asynchronously, one more step is speculated while a search runs."""

    learning_pays = True  # the guess for the step that waits is always compared

    def __init__(self, max_gamma: float, asynchronous: bool) -> None:
        self.gamma = PublishedGamma(max_gamma)
        self.measured = Measured()
        self._asynchronous = asynchronous

    def begin_request(self, warm: bool, expected_contention: float) -> None:
        """Begins another request; in the paper none is warm or contends with searches."""
        self.measured.begin_request()

    def record(self, right: int, wrong: bool) -> None:
        """Adds a verification: how many steps were right, and whether the next one was wrong."""
        self.gamma.record(right, wrong)

    def stride(self, speculated: int) -> int:
        """The next stride, given how many steps await verification; 1 before the first one."""
        gamma = self.gamma.likely
        a = self.measured.step + self.measured.guess
        b = self.measured.search(_STRIDES)
        saved = gamma**_STRIDES * np.minimum(a, b) * self._asynchronous
        rates = expected_rates(gamma, a, self.measured.verification(_STRIDES), saved)
        return max(int(np.argmax(rates)), speculated) + 1

    def one_more_pays(self, batch: int, unverified: int, elapsed: float) -> bool:
        """True if one more step should be speculated, `elapsed` seconds into a search."""
        return self._asynchronous and unverified < batch


class WaitingScheduler:
    """Our scheduler, which may choose not to speculate: a stride of 1 is the baseline.

    The last query of a search is the next step's, which waits for the result unless guessing it
    meanwhile pays. The paper's objective is exact for this: the last step that a search reaches,
    either the first wrong one or the one that waited, is generated with the truth."""

    def __init__(self, asynchronous: bool, exact: bool) -> None:
        self._usual = Gamma()
        self._first = Gamma(_PRIOR_WRONG_FIRST)  # of a request, from the ids of earlier ones
        self._all_right = Gamma()  # of those after it while all have been right
        self.gamma = self._usual  # of the next guess
        per_query = _PER_QUERY_EXACT if exact else _PER_QUERY
        self.measured = Measured(per_query, _MOST_CONTENTION)
        self._asynchronous = asynchronous

    def begin_request(self, warm: bool, expected_contention: float) -> None:
        """Begins another request, `warm` if the request cache has ids of earlier ones."""
        self.measured.begin_request(expected_contention)
        self.gamma = self._first if warm else self._usual

    def record(self, right: int, wrong: bool) -> None:
        """Adds a verification: how many steps were right, and whether the next one was wrong."""
        self.gamma.record(right, wrong)
        self.gamma = self._usual if wrong or self.gamma is self._usual else self._all_right

    @property
    def learning_pays(self) -> bool:
        """True if a guess for a step that waits for the truth is worth its time, to learn gamma."""
        measured = self.measured
        return measured.guess <= max(_LEARNING_COST * measured.step, measured.search(1))

    def stride(self, speculated: int) -> int:
        """The queries of the next search, which may leave some of the `speculated` steps for later.

        More is speculated only if that pays at the lower end of gamma too: a few right steps may be
        chance."""
        if self.gamma is self._first or not self.measured.step:
            return 1
        best = int(np.argmax(self._rates(self.gamma.likely, speculated)))
        if best > speculated:
            cautious = self._rates(self.gamma.at_least, speculated)
            if cautious[best] <= cautious[0]:
                best = max(int(np.argmax(cautious)), speculated)
        return best + 1

    def _rates(self, gamma: float, speculated: int) -> np.ndarray:
        """The verified steps per second of each stride, given the steps of the last search."""
        measured = self.measured
        guesses = _STRIDES - 1
        searched = measured.search(_STRIDES)
        step = measured.step
        saved = step * np.minimum(guesses, speculated)
        if self._asynchronous:
            # The search leaves time for this many steps, and in the long run no more than are
            # verified at once: the one that waits, then those after it.
            meanwhile = np.minimum(searched / (step + measured.guess), _STRIDES)
            right = gamma**_STRIDES * (1 - gamma**meanwhile) / (1 - gamma)
            saved = saved + step * max(2 - measured.contention, 0.0) * right
        taken = measured.verification(_STRIDES) + guesses * measured.guess
        return expected_rates(gamma, step, taken, saved)

    def one_more_pays(self, batch: int, unverified: int, elapsed: float) -> bool:
        """As in [`StrideScheduler`]: a right step saves waiting, a wrong one delays correction."""
        if not self._asynchronous or unverified - batch >= LONGEST_STRIDE:
            return False
        measured = self.measured
        step = measured.step * measured.contention
        remaining = measured.search(batch) - elapsed - measured.guess
        sure = remaining >= step or self.gamma is self._first
        gamma = self.gamma.likely if sure else self.gamma.at_least
        saved = max(2 - measured.contention, 0.0) * min(measured.step, remaining)
        return gamma ** (unverified + 1) * saved > (1 - gamma**batch) * max(step - remaining, 0.0)


Scheduler: TypeAlias = StrideScheduler | WaitingScheduler
