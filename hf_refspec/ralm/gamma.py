"""Gamma: how likely a speculated step is right (RaLMSpec, arXiv 2401.14021, section 4.2).

The paper takes it to be the same for every step. It is not: the further the text has gone since the
last query whose search the request cache has taken in, the less the cache knows of what is searched
for now. That distance is a step's lag: the first step after a verification has a lag of 1, the next
2; beside a verification, the steps that it is about count as well.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

# Lags are told apart by their powers of two: 1, 2 and 3, 4 to 7, and so on.
GROUPS = 7
# What is believed before anything is verified: that so many steps with a lag of 1 were right and
# wrong, and that a step of the next group is wrong so many times as often.
_PRIOR_RIGHT, _PRIOR_WRONG, _GROWTH = 3.0, 0.3, 1.5
# What was verified before the window counts by that factor less with every verification, and an
# earlier request for so many steps of a group at most.
_FADING, _REMEMBERED = 0.95, 30.0
# Nothing is certain, however long nothing was wrong; and nothing is lost.
_MOST_GAMMA, _LEAST_GAMMA = 0.998, 0.02


class PublishedGamma:
    """That of the paper: maximum likelihood over the last verifications, with a cap.

    Args:
        window (`int`): How many verifications count.
        most (`float`): The cap.
    """

    def __init__(self, window: int, most: float) -> None:
        self._window: deque[tuple[int, int]] = deque(maxlen=window)
        self._most = most

    def record(self, lags: Sequence[int], right: int) -> None:
        """Adds a verification.

        Args:
            lags (sequence of `int`): Of the steps that were verified.
            right (`int`): How many of them were right. The next one, if there is one, was wrong;
                nothing is known of those after it.
        """
        self._window.append((right, min(len(lags), right + 1)))

    def of(self, lags: np.ndarray) -> np.ndarray:
        """How likely steps with these lags (int64 of any shape) are right, each given that those
        before it are: float64 of the same shape, below 1."""
        right, steps = (sum(counts) for counts in zip((0, 0), *self._window, strict=True))
        return np.full(lags.shape, min(right / max(steps, 1), self._most))


class GammaByLag:
    """A mean for each group of lags, with what the group before it says as its prior.

    A group that has not been seen is taken to be wrong 1.5 times as often as the one before it, so
    that strides grow step by step in the first request of a retriever, and need not in later ones.

    Args:
        window (`int`): How many verifications count in full; those before them fade.
        seen (`np.ndarray`, float64 of shape `(GROUPS, 2)`, *optional*): Right and wrong steps of
            each group in earlier requests, see [`GammaByLag.remembered`].
    """

    def __init__(self, window: int, seen: np.ndarray | None = None) -> None:
        self._faded = np.zeros((GROUPS, 2)) if seen is None else seen
        self._window: deque[np.ndarray] = deque(maxlen=window)
        self._of_group = self._estimated()

    def record(self, lags: Sequence[int], right: int) -> None:
        """See [`PublishedGamma`]."""
        if len(self._window) == self._window.maxlen:
            self._faded = _FADING * self._faded + self._window[0]
        groups = _groups(np.array(lags[: right + 1], dtype=np.int64))
        counts = np.zeros((GROUPS, 2))
        np.add.at(counts, (groups, (np.arange(len(groups)) >= right).astype(np.int64)), 1)
        self._window.append(counts)
        self._of_group = self._estimated()

    def of(self, lags: np.ndarray) -> np.ndarray:
        """See [`PublishedGamma`]."""
        return self._of_group[_groups(lags)]

    def remembered(self) -> np.ndarray:
        """What another request of the same retriever begins with; the argument `seen`."""
        seen = self._seen()
        steps = seen.sum(axis=1, keepdims=True)
        return seen * np.minimum(1, _REMEMBERED / np.maximum(steps, _REMEMBERED))

    def _seen(self) -> np.ndarray:
        return sum(self._window, self._faded)

    def _estimated(self) -> np.ndarray:
        """How likely a step of each group is right."""
        prior_steps = _PRIOR_RIGHT + _PRIOR_WRONG
        expected_wrong, gammas = _PRIOR_WRONG / prior_steps, []
        for right, wrong in self._seen():
            of_group = (wrong + prior_steps * expected_wrong) / (right + wrong + prior_steps)
            gammas.append(1 - of_group)
            expected_wrong = min(_GROWTH * of_group, 1.0)
        # Optimism: that a longer lag did well is taken to speak for a shorter one, or few mistakes
        # would keep strides so short that nothing better could be found out.
        no_worse = np.maximum.accumulate(gammas[::-1])[::-1]
        return np.clip(no_worse, _LEAST_GAMMA, _MOST_GAMMA)


Gamma: TypeAlias = PublishedGamma | GammaByLag


def _groups(lags: np.ndarray) -> np.ndarray:
    """The group of each lag, from 0."""
    _, exponents = np.frexp(lags)
    return np.minimum(exponents - 1, GROUPS - 1)
