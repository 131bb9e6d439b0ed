"""Gamma: how likely a speculated step is right (RaLMSpec, arXiv 2401.14021, section 4.2).

The paper takes it to be the same for every step. It is not: the further the text has moved on
since the last query whose results the request cache holds, the less the cache knows. That distance
is a step's lag: 1 for the first step after a verification, then 2, 3, and so on; beside a
verification, the steps under verification count as well.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

WINDOW = 5  # the last verifications, which count in full
GROUPS = 7  # of lags: 1, 2 to 3, 4 to 7, and so on
# Pseudo-counts of right and wrong steps with a lag of 1; a step of the next group is expected to be
# wrong so many times as often.
_PRIOR_RIGHT, _PRIOR_WRONG, _GROWTH = 3.0, 0.3, 1.5
# With every verification the counts from before the window shrink by this factor; an earlier
# request counts as at most so many steps of a group.
_FADING, _REMEMBERED = 0.95, 30.0
_MOST_GAMMA, _LEAST_GAMMA = 0.998, 0.02


class PublishedGamma:
    """The paper's: maximum likelihood over the last verifications, at most `most`."""

    def __init__(self, most: float) -> None:
        self._window: deque[tuple[int, int]] = deque(maxlen=WINDOW)
        self._most = most

    def record(self, lags: Sequence[int], right: int) -> None:
        """Adds a verification of steps with these lags, of which the first `right` were right; the
        next one, if there is one, was wrong, and nothing is known of those after it."""
        self._window.append((right, min(len(lags), right + 1)))

    def of(self, lags: np.ndarray) -> np.ndarray:
        """How likely steps with these lags (int64) are right, each given that those before it are:
        float64 of the same shape, below 1."""
        right, steps = (sum(counts) for counts in zip((0, 0), *self._window, strict=True))
        return np.full(lags.shape, min(right / max(steps, 1), self._most))

    def begin_request(self) -> None:
        """Begins another request of the same retriever."""
        self._window.clear()


class GammaByLag:
    """A mean for each group of lags, with the estimate of the group before it as its prior.

    A group without counts is taken to be wrong 1.5 times as often as the one before it, so that
    strides grow step by step in a retriever's first request, and need not in later ones.
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
        # A shorter lag is no worse than a longer one, or a few mistakes would keep strides so short
        # that nothing better could be learned.
        no_worse = np.maximum.accumulate(gammas[::-1])[::-1]
        return np.clip(no_worse, _LEAST_GAMMA, _MOST_GAMMA)


Gamma: TypeAlias = PublishedGamma | GammaByLag


def _groups(lags: np.ndarray) -> np.ndarray:
    """The group of each lag, from 0."""
    _, exponents = np.frexp(lags)
    return np.minimum(exponents - 1, GROUPS - 1)
