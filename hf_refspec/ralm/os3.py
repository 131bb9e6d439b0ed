"""The stride scheduler: how many steps to speculate before they are verified.

The optimal speculation stride (OS3; RaLMSpec, arXiv 2401.14021, section 4.2) maximises the expected
number of verified steps per second, given the measured cost of a step and of a verification, and
gamma, the probability that a speculated step is right.

The paper takes gamma to be the same for every step. But the further the text has moved on since the
last query whose results the request cache holds, the less the cache knows. That distance is a
step's lag: 1 for the first step after a verification, then 2, 3, and so on; beside a verification,
the steps under verification count as well.
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
# Pseudo-counts of right and wrong steps with a lag of 1; those of each further group are
# expected to be wrong 1.5 times as often.
_PRIOR_RIGHT, _PRIOR_WRONG, _GROWTH = 3.0, 0.3, 1.5
# With every verification the counts from before the window shrink by this factor. Earlier requests
# count as at most 30 steps of each group.
_FADING, _REMEMBERED = 0.95, 30.0
_MOST_GAMMA, _LEAST_GAMMA = 0.998, 0.02


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

    def begin_request(self) -> None:
        """Begins another request of the same retriever."""
        self._window.clear()


class GammaByLag:
    """A gamma for each group of lags, with the estimate of the group before it as its prior.

    A group without counts is taken to be wrong 1.5 times as often as the group before it, so that
    strides grow step by step in a retriever's first request.
    """

    def __init__(self) -> None:
        self._faded = np.zeros((GROUPS, 2))  # right and wrong steps before the window
        self._window: deque[np.ndarray] = deque(maxlen=WINDOW)
        self._of_group = self._estimated()

    def record(self, lags: Sequence[int], right: int) -> None:
        if len(self._window) == self._window.maxlen:
            self._faded = _FADING * self._faded + self._window[0]
        groups = _groups(np.array(lags[: right + 1], dtype=np.int64))
        counts = np.zeros((GROUPS, 2))
        np.add.at(counts, (groups, (np.arange(len(groups)) >= right).astype(np.int64)), 1)
        self._window.append(counts)
        self._of_group = self._estimated()

    def of(self, lags: np.ndarray) -> np.ndarray:
        return self._of_group[_groups(lags)]

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
        expected_wrong, gammas = _PRIOR_WRONG / prior_steps, []
        for right, wrong in self._seen():
            of_group = (wrong + prior_steps * expected_wrong) / (right + wrong + prior_steps)
            gammas.append(1 - of_group)
            expected_wrong = min(_GROWTH * of_group, 1.0)
        # A shorter lag is taken to be no worse than a longer one. Otherwise a few mistakes would
        # keep strides so short that nothing better could be learned.
        no_worse = np.maximum.accumulate(gammas[::-1])[::-1]
        return np.clip(no_worse, _LEAST_GAMMA, _MOST_GAMMA)


Gamma: TypeAlias = PublishedGamma | GammaByLag


def _groups(lags: np.ndarray) -> np.ndarray:
    """The group of each lag, from 0."""
    _, exponents = np.frexp(lags)
    return np.minimum(exponents - 1, GROUPS - 1)


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
    (Theil-Sen), so that a disturbed search, as the first one often is, does not count.
    """

    def __init__(self) -> None:
        self._samples: deque[tuple[int, float]] = deque(maxlen=_SEARCH_SAMPLES)
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
        self.per_query = max(float(np.median(slopes)), 0.0) if len(slopes) else 0.0
        self.fixed = max(float(np.median(times - self.per_query * batches)), 0.0)


class StrideScheduler:
    """Chooses the next stride, and the steps beside a verification.

    Beside a verification at most `steps_ahead` steps run: 0 if it is synchronous, 1 in the paper,
    and all that pay with `None`.
    """

    def __init__(self, gamma: Gamma, steps_ahead: int | None) -> None:
        self.gamma = gamma
        self.search_seconds = SearchSeconds()
        self._steps_ahead = steps_ahead
        self._step_seconds: deque[float] = deque(maxlen=_STEP_SAMPLES)
        # Those of them that ran alone, and those that ran beside a search.
        self._alone: deque[float] = deque(maxlen=_STEP_SAMPLES)
        self._beside: deque[float] = deque(maxlen=_STEP_SAMPLES)
        self._overheads: deque[float] = deque(maxlen=_STEP_SAMPLES)

    def begin_request(self) -> None:
        """Begins another request of the same retriever."""
        self.gamma.begin_request()
        for samples in (self._alone, self._beside, self._overheads):
            samples.clear()

    @property
    def step_seconds(self) -> float:
        return sum(self._step_seconds) / max(len(self._step_seconds), 1)

    @property
    def contention(self) -> float:
        """How many times as long a step takes while a search runs: a ratio of medians, since a step
        that begins with another passage takes far longer."""
        if min(len(self._alone), len(self._beside)) < _ENOUGH_STEPS:
            return 1.0
        slower = median(self._beside) / median(self._alone)
        return min(max(slower, 1.0), _MOST_CONTENTION)

    def record_step(self, seconds: float, beside_search: bool = False) -> None:
        self._step_seconds.append(seconds)
        (self._beside if beside_search else self._alone).append(seconds)

    def record_overhead(self, seconds: float) -> None:
        """Adds the time of a verification besides its search and the steps beside it."""
        self._overheads.append(seconds)

    def stride(self, speculated: int = 0) -> int:
        """How many steps to verify next, given how many were speculated beside the last search.

        It is 1 before the first verification, and later the best in the long run. But if a search
        takes longer than the steps of a stride, the next one begins at once, provided that a
        stride's steps pay beside it.
        """
        if not self._overheads or not self._step_seconds:
            return 1
        search_seconds = self.search_seconds(_STRIDES)
        taken, saved = search_seconds + median(self._overheads), self._saved_seconds(search_seconds)
        rates = expected_rates(self.gamma.of(_STRIDES), self.step_seconds, taken, saved)
        stride = int(_STRIDES[np.argmax(rates)])
        if self._steps_ahead is None and taken[stride - 1] > stride * self.step_seconds:
            verified, ahead = range(1, stride + 1), range(stride + 1, 2 * stride)
            if self.one_more_pays(verified, ahead, elapsed=0.0):
                stride = 1
        return max(stride, speculated)

    def _saved_seconds(self, search_seconds: np.ndarray) -> np.ndarray:
        """The seconds that steps beside a verification of each stride are expected to save."""
        all_right = np.cumprod(self.gamma.of(_LAGS))
        if self._steps_ahead is not None:
            saved = np.minimum(self._steps_ahead * self.step_seconds, search_seconds)
            return all_right[:LONGEST_STRIDE] * saved
        # The search leaves time for this many, and in the long run no more than are verified at
        # once. Each saves the time of a step, if it and all before it are right.
        ahead = np.minimum(search_seconds / (self.step_seconds * self.contention), _STRIDES)
        right = np.cumsum(all_right)
        return self.step_seconds * (
            np.interp(_STRIDES + ahead, _LAGS, right) - right[:LONGEST_STRIDE]
        )

    def one_more_pays(self, verified: Sequence[int], ahead: Sequence[int], elapsed: float) -> bool:
        """Whether to speculate one more step, `elapsed` seconds into a verification, given the lags
        of the steps under verification and of those that were speculated since.

        If all is right, the step saves waiting time. If a step under verification is wrong, it
        delays the correction; if an earlier step ahead is wrong, its query is searched in vain.
        """
        if self._steps_ahead is not None:  # as published, whatever it costs
            return len(ahead) < self._steps_ahead
        if len(ahead) >= LONGEST_STRIDE:
            return False
        lags = np.array([*verified, *ahead, len(verified) + len(ahead) + 1])
        right = np.cumprod(self.gamma.of(lags))
        batch_right, ahead_right, all_right = right[len(verified) - 1], right[-2], right[-1]
        # A search that is late already will be late by as much again, as likely as not.
        remaining = abs(self.search_seconds(len(verified)) - elapsed)
        saved = all_right * min(self.step_seconds, remaining)
        delay = (1 - batch_right) * max(self.step_seconds - remaining, 0.0)
        in_vain = (batch_right - ahead_right) * self.search_seconds.per_query
        return bool(saved > delay + in_vain)
