"""The stride scheduler: how many steps to speculate before they are verified.

Optimal speculation stride (OS3; RaLMSpec, section 4.2): the stride that maximises the expected
number of verified steps per second, from what a step and a verification are measured to take and
from how often speculation is right.
"""

from __future__ import annotations

from collections import deque
from math import sqrt
from typing import Any

import numpy as np

# No stride is longer: text that is rolled back has been generated in vain.
LONGEST_STRIDE = 32
_STEP_SAMPLES = 16
# How many steps with and without a search beside them say how much they contend, and for how many
# times the time at most: they do not more than halve each other.
_ENOUGH_STEPS, _MOST_CONTENTION = 3, 2.0
_SEARCH_SAMPLES = 24
# How fast verifications before the window fade from the estimate of gamma.
_FADING = 0.95
# What is believed before anything is verified (right and wrong steps), how many standard deviations
# below the mean gamma is taken to be, and for how many steps at most an earlier request counts.
PRIOR = (3.0, 0.3)
_CAUTION = 0.25
_REMEMBERED = 20.0
# Nothing is certain, however long nothing was wrong.
_MOST_GAMMA = 0.995


def expected_rate(
    strides: Any,
    gamma: float,
    step_seconds: float,
    search_seconds: Any,
    saved_seconds: Any = 0.0,
) -> Any:
    """The expected number of verified steps per second.

    With nothing saved it is the synchronous objective of the paper, with `min(a, b)` saved the
    asynchronous one.

    Args:
        strides (`int` or int array): s, how many steps are speculated before a verification.
        gamma (`float`): How likely a speculated step is right, below 1.
        step_seconds (`float`): a, of one speculated step.
        search_seconds (`float` or float array): b, of a verification of that many steps.
        saved_seconds (`float` or float array): What is saved, where all steps are right, by those
            that run beside the verification.
    """
    all_right = gamma**strides
    verified = (1 - all_right) / (1 - gamma)
    return verified / (strides * step_seconds + search_seconds - all_right * saved_seconds)


class SearchSeconds:
    """What a search takes, `b0 + b1 * batch`, fitted to the last ones.

    The slope is the median of those between any two searches with batches of different sizes
    (Theil-Sen): a search that was disturbed, as the first one often is, does not count.
    """

    def __init__(self) -> None:
        self._samples: deque[tuple[int, float]] = deque(maxlen=_SEARCH_SAMPLES)
        self.fixed = 0.0
        self.per_query = 0.0

    def record(self, batch: int, seconds: float) -> None:
        """Adds a search for that many queries."""
        self._samples.append((batch, seconds))
        batches, times = np.array(self._samples).T
        first, second = np.triu_indices(len(batches), 1)
        differ = batches[first] != batches[second]
        slopes = (times[second] - times[first])[differ] / (batches[second] - batches[first])[differ]
        self.per_query = max(float(np.median(slopes)), 0.0) if len(slopes) else 0.0
        self.fixed = max(float(np.median(times - self.per_query * batches)), 0.0)

    def __call__(self, batch: Any) -> Any:
        """The expected seconds of a search for that many queries (`int` or int array)."""
        return self.fixed + self.per_query * batch


class Gamma:
    """How likely a speculated step is right, estimated from the last verifications.

    Args:
        window (`int`): How many verifications count in full.
        most (`float`, *optional*): With a number, the estimate is that of the paper: maximum
            likelihood over the window, at most this. Without one, verifications before the window
            still count as a Beta prior that fades, and the estimate lies some way below the mean
            of what is believed then: the less has been seen, the further.
        prior (`tuple` of two floats, *optional*): How many right and wrong steps count as seen at
            first.
    """

    def __init__(self, window: int, most: float | None, prior: tuple[float, float] = PRIOR) -> None:
        self._window: deque[tuple[int, int]] = deque(maxlen=window)
        self._most = most
        self._right, self._wrong = prior

    def record(self, right: int, wrong: int) -> None:
        """Adds a verification: how many steps were right, and whether (0 or 1) one was wrong."""
        if len(self._window) == self._window.maxlen:
            oldest_right, oldest_wrong = self._window[0]
            self._right = _FADING * self._right + oldest_right
            self._wrong = _FADING * self._wrong + oldest_wrong
        self._window.append((right, wrong))

    @property
    def value(self) -> float:
        right, wrong = self._in_window()
        if self._most is not None:
            return min(right / max(right + wrong, 1.0), self._most)
        right, wrong = right + self._right, wrong + self._wrong
        count = right + wrong
        mean = right / count
        deviation = sqrt(mean * (1 - mean) / (count + 1))
        return min(max(mean - _CAUTION * deviation, 0.0), _MOST_GAMMA)

    def remembered(self) -> tuple[float, float]:
        """What is believed now, as the prior of another request."""
        right, wrong = self._in_window()
        right, wrong = right + self._right, wrong + self._wrong
        weight = min(1.0, _REMEMBERED / (right + wrong))
        return weight * right, weight * wrong

    def _in_window(self) -> tuple[float, float]:
        right = float(sum(right for right, _ in self._window))
        wrong = float(sum(wrong for _, wrong in self._window))
        return right, wrong


class StrideScheduler:
    """Chooses the next stride from what it is told about the last ones.

    Args:
        window (`int`): See [`Gamma`].
        max_gamma (`float`, *optional*): See [`Gamma`].
        steps_ahead (`int`, *optional*): The most steps that run beside a verification: 0 where it
            is waited for, 1 as in the paper, `None` for as many as pay.
        prior (`tuple` of two floats, *optional*): See [`Gamma`].
    """

    def __init__(
        self,
        window: int,
        max_gamma: float | None,
        steps_ahead: int | None,
        prior: tuple[float, float] = PRIOR,
    ) -> None:
        self._gamma = Gamma(window, max_gamma, prior)
        self._is_published = max_gamma is not None
        self._steps_ahead = steps_ahead
        self._verified = 0
        self._step_seconds: deque[float] = deque(maxlen=_STEP_SAMPLES)
        # The same, parted by whether a search ran beside them.
        self._alone: deque[float] = deque(maxlen=_STEP_SAMPLES)
        self._beside: deque[float] = deque(maxlen=_STEP_SAMPLES)
        self._overheads: deque[float] = deque(maxlen=_STEP_SAMPLES)
        self.search_seconds = SearchSeconds()

    @property
    def gamma(self) -> float:
        """How likely a speculated step is right."""
        return self._gamma.value

    def remembered(self) -> tuple[float, float]:
        """How likely a speculated step is right, see [`Gamma.remembered`]."""
        return self._gamma.remembered()

    @property
    def step_seconds(self) -> float:
        """What a speculated step takes; 0 before there is any."""
        return sum(self._step_seconds) / max(len(self._step_seconds), 1)

    @property
    def contention(self) -> float:
        """How many times as long a step takes while a search runs: the two contend for memory and
        the interpreter. Medians: a step that begins with another passage takes far longer."""
        if min(len(self._alone), len(self._beside)) < _ENOUGH_STEPS:
            return 1.0
        slower = float(np.median(self._beside) / np.median(self._alone))
        return min(max(slower, 1.0), _MOST_CONTENTION)

    def record_step(self, seconds: float, beside_search: bool = False) -> None:
        """Adds a speculated step, during which a search ran or not."""
        self._step_seconds.append(seconds)
        (self._beside if beside_search else self._alone).append(seconds)

    def record_search(self, batch: int, seconds: float) -> None:
        """Adds a search for that many queries."""
        self.search_seconds.record(batch, seconds)

    def record_verification(self, right: int, wrong: int) -> None:
        """Adds what came of a verification, see [`Gamma.record`]."""
        self._gamma.record(right, wrong)
        self._verified += right

    def record_overhead(self, seconds: float) -> None:
        """Adds what a verification took besides its search and the steps beside it."""
        self._overheads.append(seconds)

    def stride(self) -> int:
        """How many steps to speculate before the next verification; 1 before there was any.

        At first the request cache knows little, and guesses are wrong more often than later: no
        stride is longer than all that this request has verified, and one more.
        """
        if not self._overheads:
            return 1
        longest = LONGEST_STRIDE
        if not self._is_published:
            longest = min(longest, self._verified + 1)
        strides = np.arange(1, longest + 1)
        search_seconds = self.search_seconds(strides)
        rates = expected_rate(
            strides,
            self.gamma,
            self.step_seconds,
            search_seconds + float(np.median(self._overheads)),
            self._saved_seconds(search_seconds),
        )
        return int(strides[np.argmax(rates)])

    def _saved_seconds(self, search_seconds: np.ndarray) -> np.ndarray:
        """What steps beside a verification save where it finds all to be right."""
        if self._steps_ahead is not None:
            return np.minimum(self._steps_ahead * self.step_seconds, search_seconds)
        # As many as there is time for. Each saves what it would have taken without the search, if
        # it and those before it are right: the more they contend, the fewer searches are best.
        step_seconds_beside = self.step_seconds * self.contention
        ahead = np.minimum(search_seconds / step_seconds_beside, LONGEST_STRIDE)
        gamma = self.gamma
        right = gamma * (1 - gamma**ahead) / (1 - gamma)
        return right * self.step_seconds

    def pays_to_go_on(self, batch: int, ahead: int, elapsed: float) -> bool:
        """Whether to speculate one more step while a verification runs.

        If all is right, the step saves what would have been waited. Where a step under
        verification is wrong, it delays the news of that; where an earlier step ahead is wrong,
        this one's query will be searched for in vain.

        Args:
            batch (`int`): The steps that are being verified.
            ahead (`int`): The steps that were speculated since.
            elapsed (`float`): For how long the verification has been running.
        """
        gamma, step_seconds = self.gamma, self.step_seconds
        # One that is late already is as likely as not to be late by as much again.
        remaining = abs(self.search_seconds(batch) - elapsed)
        batch_right = gamma**batch
        saved = batch_right * gamma ** (ahead + 1) * min(step_seconds, remaining)
        delay = (1 - batch_right) * max(step_seconds - remaining, 0.0)
        in_vain = batch_right * (1 - gamma**ahead) * self.search_seconds.per_query
        return bool(saved > delay + in_vain)
