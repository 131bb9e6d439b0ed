"""The stride scheduler: how many steps to speculate before they are verified.

The optimal speculation stride (OS3; RaLMSpec, arXiv 2401.14021, section 4) maximises the expected
number of verified steps per second, given the measured cost of a step and of a verification, and
gamma, the probability that a speculated step is right.

The paper takes gamma to be the same for every step. But the further the text has moved on since the
last query whose results the request cache holds, the less the cache knows. That distance is a
step's lag: 1 for the first step after a verification, then 2, 3, and so on; beside a verification,
the steps under verification count as well. And the paper always speculates: `WaitingScheduler` does
not where waiting is faster.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Any, TypeAlias

import numpy as np

LONGEST_STRIDE = 32
_STEP_SAMPLES = 16
# The fewest steps with and without a concurrent search to estimate contention from, and its limit.
_ENOUGH_STEPS, _MOST_CONTENTION = 3, 2.0
_SEARCH_SAMPLES = 24
_STRIDES = np.arange(1, LONGEST_STRIDE + 1)
_LAGS = np.arange(1, 2 * LONGEST_STRIDE + 1)

WINDOW = 5  # verifications that count in full, the last ones
GROUPS = 7  # of lags: 1, 2 to 3, 4 to 7, and so on
# Two further groups while guesses from the ids of earlier requests have all been right: the lag of
# a request's first step, and that of the others.
_FIRST, _OTHERS = 1 << GROUPS, (1 << GROUPS) + 1
# Pseudo-counts of right and wrong steps with a lag of 1; those of each further group are
# expected to be wrong 1.5 times as often.
_PRIOR_RIGHT, _PRIOR_WRONG, _GROWTH = 3.0, 0.3, 1.5
# With every verification the counts from before the window shrink by this factor. Earlier requests
# count as at most 30 steps of each group.
_FADING, _REMEMBERED = 0.95, 30.0
_MOST_GAMMA, _LEAST_GAMMA = 0.998, 0.02
_DEVIATIONS = 3  # by which gamma is taken lower where a wrong guess costs time

# What a further query is taken to add, in searches for one query, until batches of two sizes were
# measured: an exact search reads its vectors for several queries at once.
_EACH, _EACH_IF_EXACT = 0.75, 0.25
# What a guess may cost, of a step's time, if nothing is generated with it.
_LEARNING_COSTS = 0.01


class PublishedGamma:
    """The paper's gamma: maximum likelihood over the last verifications, at most `most`."""

    def __init__(self, most: float) -> None:
        self._window: deque[tuple[int, int]] = deque(maxlen=WINDOW)
        self._most = most

    def record(self, lags: Sequence[int], right: int) -> None:
        """Adds a verification of steps with these lags. The first `right` steps were right, the
        next one, if any, was wrong, and nothing is known of those after it."""
        self._window.append((right, min(len(lags), right + 1)))

    def of(self, lags: np.ndarray) -> np.ndarray:
        """The probabilities that steps with these lags (int64) are right, each given that the
        steps before it are: float64 of the same shape, below 1."""
        right, steps = (sum(counts) for counts in zip((0, 0), *self._window, strict=True))
        return np.full(lags.shape, min(right / max(steps, 1), self._most))


class GammaByLag:
    """A gamma for each group of lags, with the estimate of the group before it as its prior.

    A group without counts is taken to be wrong 1.5 times as often as the group before it, so that
    strides grow step by step in a retriever's first request.
    """

    def __init__(self) -> None:
        self._faded = np.zeros((GROUPS + 2, 2))  # right and wrong steps before the window
        self._window: deque[np.ndarray] = deque(maxlen=WINDOW)
        self._of_group = self._estimated()

    def record(self, lags: Sequence[int], right: int) -> None:
        if len(self._window) == self._window.maxlen:
            if self._window[0][:GROUPS].any():
                self._faded[:GROUPS] *= _FADING
            self._faded += self._window[0]
        groups = _groups(np.array(lags[: right + 1], dtype=np.int64))
        counts = np.zeros((GROUPS + 2, 2))
        np.add.at(counts, (groups, (np.arange(len(groups)) >= right).astype(np.int64)), 1)
        self._window.append(counts)
        self._of_group = self._estimated()

    def of(self, lags: np.ndarray) -> np.ndarray:
        return self._of_group[0][_groups(lags)]

    def at_least(self, lags: np.ndarray) -> np.ndarray:
        """As `of`, but lower by what is uncertain."""
        return self._of_group[1][_groups(lags)]

    def begin_request(self) -> None:
        seen = self._seen()
        steps = seen.sum(axis=1, keepdims=True)
        self._faded = seen * np.minimum(1, _REMEMBERED / np.maximum(steps, _REMEMBERED))
        self._window.clear()
        self._of_group = self._estimated()

    def _seen(self) -> np.ndarray:
        return sum(self._window, self._faded)

    def _estimated(self) -> np.ndarray:
        prior_steps = _PRIOR_RIGHT + _PRIOR_WRONG
        expected_wrong = _PRIOR_WRONG / prior_steps
        gammas: list[float] = []
        for group, (right, wrong) in enumerate(self._seen()):
            if group > GROUPS:  # once the first guess was right, as after a search
                expected_wrong = 1 - gammas[0]
            of_group = (wrong + prior_steps * expected_wrong) / (right + wrong + prior_steps)
            gammas.append(1 - of_group)
            expected_wrong = min(_GROWTH * of_group, 1.0)
        # A shorter lag is taken to be no worse than a longer one. Otherwise a few mistakes would
        # keep strides so short that nothing better could be learned.
        no_worse = np.array(gammas)
        no_worse[:GROUPS] = np.maximum.accumulate(no_worse[:GROUPS][::-1])[::-1]
        # The uncertainty of the first group: of longer lags nothing is learned without trying.
        first, steps = gammas[0], prior_steps + self._seen()[0].sum()
        lower = no_worse.copy()
        lower[:GROUPS] -= _DEVIATIONS * (first * (1 - first) / (steps + 1)) ** 0.5
        return np.clip([no_worse, lower], _LEAST_GAMMA, _MOST_GAMMA)


Gamma: TypeAlias = PublishedGamma | GammaByLag


def _groups(lags: np.ndarray) -> np.ndarray:
    """The group of each lag, from 0."""
    _, exponents = np.frexp(lags)
    return np.minimum(exponents, GROUPS) - 1 + (lags >= _FIRST) + (lags >= _OTHERS)


def expected_rates(
    right: np.ndarray,
    step_seconds: float,
    search_seconds: np.ndarray,
    saved_seconds: np.ndarray | float = 0.0,
) -> np.ndarray:
    """The expected number of verified steps per second for the strides 1 to n, float64 of shape
    `(n,)`, given the gamma of each step.

    A step takes `step_seconds` (a), a verification of 1 to n steps `search_seconds` (b), of which
    steps beside it save some. With one gamma for all steps this is the objective of the paper: the
    synchronous one if nothing is saved, the asynchronous one if `min(a, b)` is saved whenever all
    steps are right.
    """
    all_right = np.cumprod(right)
    # The steps before the first wrong one, and that one, which is repeated with the truth.
    steps = 1 + np.cumsum(all_right) - all_right
    speculation_seconds = step_seconds * np.arange(1, len(right) + 1)
    return steps / (speculation_seconds + search_seconds - saved_seconds)


class SearchSeconds:
    """The time of a search, `b0 + b1 * batch`, fitted to the last searches.

    The slope is the median slope between any two of them with batches of different sizes
    (Theil-Sen), so that a disturbed search, as the first one often is, does not count. Before sizes
    differ, b1 is taken to be the fraction `each` of a search for one query.
    """

    def __init__(self, each: float = 0.0) -> None:
        self._samples: deque[tuple[int, float]] = deque(maxlen=_SEARCH_SAMPLES)
        self._each = each
        self.fixed = self.per_query = 0.0

    def __call__(self, batch: Any) -> Any:
        """The expected seconds of a search for `batch` queries (`int` or int array)."""
        return self.fixed + self.per_query * batch

    def record(self, batch: int, seconds: float) -> None:
        self._samples.append((batch, seconds))
        batches, times = np.array(self._samples).T
        first, second = np.triu_indices(len(batches), 1)
        differ = batches[first] != batches[second]
        slopes = (times[second] - times[first])[differ] / (batches[second] - batches[first])[differ]
        if not len(slopes):
            slopes = self._each * times / (1 + self._each * (batches - 1))
        self.per_query = max(float(np.median(slopes)), 0.0)
        self.fixed = max(float(np.median(times - self.per_query * batches)), 0.0)
        self._each = self.per_query / max(self(1), 1e-9)  # after a window of equal batches as well


class StrideScheduler:
    """Chooses the next stride as in the paper: the number of speculated steps that are verified
    together. Beside a verification run at most `steps_ahead` steps, 0 or 1."""

    def __init__(self, gamma: Gamma, steps_ahead: int, each: float = 0.0) -> None:
        self.gamma = gamma
        self.search_seconds = SearchSeconds(each)
        self._steps_ahead = steps_ahead
        self._steps: deque[float] = deque(maxlen=_STEP_SAMPLES)
        self._guesses: deque[float] = deque(maxlen=_STEP_SAMPLES)
        self._overheads: deque[float] = deque(maxlen=_STEP_SAMPLES)
        self._with_prompt = 0.0  # of a first step
        self.warm = False  # whether ids of earlier requests have led to no wrong guess of this one

    def begin_request(self) -> None:
        """Begins another request of the same retriever, perhaps with another model."""
        self._steps.clear()
        self._overheads.clear()
        self._searched = False

    def lag(self, steps: int) -> int:
        """The lag of a step, the last of that many since the last search whose results the request
        cache holds, or since the request began."""
        if not self.warm:
            return steps
        return _OTHERS if self._searched or steps > 1 else _FIRST

    @property
    def step_seconds(self) -> float:
        return sum(self._steps) / len(self._steps) if self._steps else self._with_prompt

    @property
    def guess_seconds(self) -> float:
        return median(self._guesses or [0.0])

    @property
    def _overhead(self) -> float:
        return median(self._overheads or [0.0])

    def record_step(self, seconds: float, beside: bool, first: bool = False) -> None:
        """Adds a step, its guess not counted, whether a search ran beside it, and whether it was
        the first of the text."""
        if first:
            self._with_prompt = seconds
        else:
            self._steps.append(seconds)

    def record_guess(self, seconds: float) -> None:
        self._guesses.append(seconds)

    def record_search(self, batch: int, seconds: float, beside_seconds: float) -> None:
        """Adds a search, and for how long steps ran beside it."""
        self._searched = True
        self.search_seconds.record(batch, seconds)

    def record_overhead(self, seconds: float) -> None:
        """Adds the time of a verification besides its search and the steps beside it."""
        self._overheads.append(seconds)

    @property
    def learning_pays(self) -> bool:
        """Whether to guess for a step that waits for the truth, to learn gamma."""
        return False

    def stride(self, lags: Sequence[int]) -> int:
        """The next stride, given the lags of the steps that were speculated beside the last search,
        all of which it has. It is 1 before the first verification."""
        if not self._overheads:
            return max(1, len(lags))
        a, searched = self.step_seconds + self.guess_seconds, self.search_seconds(_STRIDES)
        right = self.gamma.of(_STRIDES)
        saved = np.cumprod(right) * np.minimum(self._steps_ahead * a, searched)
        rates = expected_rates(right, a, searched + self._overhead, saved)
        return max(int(_STRIDES[np.argmax(rates)]), len(lags))

    def one_more_pays(self, batch: int, lags: Sequence[int], elapsed: float) -> bool:
        """Whether to speculate one more step, `elapsed` seconds into a search for `batch` queries,
        given the lags of all steps that are not verified."""
        return len(lags) - batch < self._steps_ahead


class WaitingScheduler(StrideScheduler):
    """Ours, which may choose not to speculate.

    The last query of a search is that of the next step, which waits for its result, unless guessing
    it pays beside the search. So a stride counts queries, and a stride of 1 is the baseline. With
    that the paper's objective is exact: of all steps that a search reaches, the last one, be it the
    first wrong one or the one that waited, is generated with the truth.

    Where a wrong guess would cost time, gamma is taken from the lower end of what was seen.
    """

    gamma: GammaByLag

    def __init__(self, asynchronous: bool, exact: bool) -> None:
        ahead, each = LONGEST_STRIDE if asynchronous else 0, _EACH_IF_EXACT if exact else _EACH
        super().__init__(GammaByLag(), ahead, each)
        # Steps that ran alone, and those that ran beside a search.
        self._alone: deque[float] = deque(maxlen=_STEP_SAMPLES)
        self._beside: deque[float] = deque(maxlen=_STEP_SAMPLES)
        # How many times as long a step takes while a search runs, which takes longer as well.
        self.contention = 1.0

    def begin_request(self) -> None:
        super().begin_request()
        self.gamma.begin_request()
        self._alone.clear()
        self._beside.clear()
        self.contention = (1 + self.contention) / 2  # it may have been other work

    def record_step(self, seconds: float, beside: bool, first: bool = False) -> None:
        super().record_step(seconds / (self.contention if beside else 1.0), beside, first)
        if not first:
            (self._beside if beside else self._alone).append(seconds)
        if min(len(self._alone), len(self._beside)) >= _ENOUGH_STEPS:
            # A ratio of medians, since a step that begins with another passage takes far longer.
            slower = median(self._beside) / median(self._alone)
            self.contention = min(max(slower, 1.0), _MOST_CONTENTION)

    def record_search(self, batch: int, seconds: float, beside_seconds: float) -> None:
        slowed = min(beside_seconds, seconds) * (1 - 1 / self.contention)
        super().record_search(batch, seconds - slowed, beside_seconds)

    @property
    def learning_pays(self) -> bool:
        least = max(_LEARNING_COSTS * self.step_seconds, self.search_seconds(1))
        return self.guess_seconds <= least

    def stride(self, lags: Sequence[int]) -> int:
        """The queries of the next search, given the lags of the steps that await verification; it
        may leave some of them for later.

        It is the best number in the long run. But if a search takes longer than the steps of a
        stride, the next one begins at once, provided that steps are generated beside it.
        """
        if not self._searched:
            return 1
        ahead = np.array([*lags, *map(self.lag, _LAGS[len(lags) :])])[: len(_LAGS)]
        stride = int(np.argmax(self._rates(self.gamma.of(ahead), len(lags)))) + 1
        if stride <= len(lags) + 1:
            return stride
        if self.one_more_pays(len(lags) + 1, lags, elapsed=0.0) and self._at_once(
            stride, np.cumprod(self.gamma.of(ahead)), len(lags)
        ):
            return len(lags) + 1
        cautious = self._rates(self.gamma.at_least(ahead), len(lags))
        if cautious[stride - 1] <= cautious[0]:
            stride = int(np.argmax(cautious)) + 1
        return max(stride, len(lags) + 1)

    def _at_once(self, stride: int, all_right: np.ndarray, speculated: int) -> bool:
        """Whether more steps are verified per second if the next search begins at once, the others
        of the stride are generated beside it, and verified by a second search."""
        steps = 1 + np.cumsum(all_right)[[stride - 2, stride - 1]]
        first, second = self.search_seconds(np.array([speculated + 1, stride]))
        generating = (stride - speculated) * self.step_seconds
        slowed = (self.contention - 1) * generating + self.step_seconds
        at_once = first + all_right[speculated] * second + slowed
        return bool(second > generating and steps[1] * (second + generating) > steps[0] * at_once)

    def _rates(self, right: np.ndarray, speculated: int) -> np.ndarray:
        """The verified steps per second of each stride, given the gamma of each step, and how many
        were speculated beside the last search."""
        a, searched = self.step_seconds, self.search_seconds(_STRIDES)
        taken = searched + self._overhead + (_STRIDES - 1) * self.guess_seconds
        saved = a * np.minimum(_STRIDES - 1, speculated)
        if self._steps_ahead:
            saved = saved + a * self._steps_saved(np.cumprod(right), searched)
        return expected_rates(right[:LONGEST_STRIDE], a, taken, saved)

    def _steps_saved(self, all_right: np.ndarray, searched: np.ndarray) -> np.ndarray:
        """How many steps' time is saved beside the search of each stride, as expected."""
        each = (self.step_seconds + self.guess_seconds) * self.contention
        # The search leaves time for this many, and in the long run no more than are verified at
        # once: the one that waits, then those after it.
        whole, part = np.divmod(np.minimum(searched / each, _STRIDES), 1)
        whole = whole.astype(np.int64)
        right = np.concatenate([[0.0], np.cumsum(all_right)])
        last = np.minimum(_STRIDES - 1 + whole, len(all_right) - 1)
        # The last step is not over when the search ends. If that finds a mistake, it was in vain.
        in_part = all_right[last] * part - (1 - all_right[:LONGEST_STRIDE]) * (1 - part)
        saved = right[_STRIDES - 1 + whole] - right[_STRIDES - 1] + np.maximum(in_part, 0.0)
        return saved * (2 - self.contention)

    def one_more_pays(self, batch: int, lags: Sequence[int], elapsed: float) -> bool:
        """As above. If all is right, the step saves waiting time; if one that is being verified is
        wrong, it delays the correction."""
        if len(lags) - batch >= self._steps_ahead or not self._steps_ahead:
            return False
        step = self.step_seconds * self.contention
        # A search that is late already will be late by as much again, as likely as not.
        remaining = abs(self.search_seconds(batch) - elapsed) - self.guess_seconds
        gamma = self.gamma.of if remaining >= step else self.gamma.at_least
        right = np.cumprod(gamma(np.array([*lags, self.lag(len(lags) + 1)])))
        saved = (2 - self.contention) * right[-1] * min(self.step_seconds, remaining)
        return bool(saved > (1 - right[batch - 1]) * max(step - remaining, 0.0))
