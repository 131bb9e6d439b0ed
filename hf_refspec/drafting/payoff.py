"""Whether a pass of an assistant model pays: what such passes cost, and what they brought."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import median

import numpy as np

# A pass costs the median of this number of passes, each over at most this number of new tokens.
_PASSES, _FEW_TOKENS = 15, 4
# Before anything is known: how often the next token is taken to be among the assistant's, and to be
# its best one, and the weight of these priors. Outcomes fade by this factor with each pass of the
# target, so that the assistant is tried again.
_ACCEPTED, _BEST_ACCEPTED, _PSEUDO_COUNT, _MEMORY = 0.8, 0.6, 2.0, 0.98
# How many passes are planned ahead, for the first alone may not pay where a pass over two tokens
# takes much longer than over one; and how many nodes each pass adds beside its best one.
_AHEAD, _BESIDE = 4, 3
# Where the call names the number of nodes, a draft takes another pass only if the best tokens of
# the passes before it are accepted together this often: otherwise an assistant that is sure and
# wrong would run as often as there are nodes, one pass after another, for each row.
_LEAST_CHANCE = 0.05
# An assistant that does not pay may take this part of the time, to find out where it does.
_ALLOWANCE = 0.02


@dataclass(frozen=True, slots=True)
class Prices:
    """What a call's time is worth at present, for drafters that take much of it.

    Attributes:
        token_seconds (`float`): The time of a token, which an accepted one saves: 0 if it is not
            known yet; infinite where the call names how many nodes it drafts.
        tokens (`tuple[int, ...]`): The numbers of tokens that a pass of the target may have now.
        pass_seconds (`tuple[float, ...]`): The time of a pass over each of these numbers.
        others (`int`): How many of a pass's tokens are other rows'.
    """

    token_seconds: float = math.inf
    tokens: tuple[int, ...] = (1,)
    pass_seconds: tuple[float, ...] = (0.0,)
    others: int = 0

    def best(self, probs: np.ndarray) -> tuple[int, float]:
        """How many of these nodes pay, and the seconds that a pass over them is expected to save,
        less the seconds that it takes."""
        room = max(self.tokens[-1] - 1 - self.others, 0)
        saved = self.token_seconds * np.cumsum(np.sort(probs)[::-1][:room], dtype=float)
        values = np.concatenate(([0.0], saved)) - self.seconds(np.arange(1 + len(saved)))
        return int(values.argmax()), float(values.max())

    def seconds(self, nodes: np.ndarray) -> np.ndarray:
        """The time of a pass over some numbers of nodes of the text."""
        return np.interp(1 + self.others + nodes, self.tokens, self.pass_seconds)


class Payoff:
    """What the passes of an assistant have cost and brought so far, over all texts.

    Passes pay if the time that their tokens are expected to save, less what the target takes longer
    over them, is longer than they take. Whatever is expected, the assistant runs only while it has
    saved at least as much time as it took, the prompt of the present text not counted.

    Attributes:
        prices ([`Prices`]): Of the call, at present.
    """

    def __init__(self) -> None:
        self.prices = Prices()
        self._seconds: deque[float] = deque(maxlen=_PASSES)
        self._asked = _PSEUDO_COUNT
        self._accepted = _ACCEPTED * _PSEUDO_COUNT
        self._best_accepted = _BEST_ACCEPTED * _PSEUDO_COUNT
        self._balance = 0.0  # seconds saved, less those taken
        self._draft_seconds = 0.0  # what the present draft took
        self._prompt_seconds = 0.0  # and the present prompt

    def pays(self, probs: np.ndarray, chance: float, passes: int = 0) -> bool:
        """Whether to run the assistant.

        Args:
            probs (`np.ndarray`, float32 of shape `(n,)`): The estimates of all nodes so far.
            chance (`float`): That its path is accepted, and that no other source has what follows.
            passes (`int`): How often it has run for this draft.
        """
        best = self._best_accepted / self._asked
        if not self.counts:
            return chance > 0 and best**passes > _LEAST_CHANCE
        if self._balance < 0:
            return False
        seconds = median(self._seconds) if self._seconds else 0.0
        beside = (self._accepted / self._asked - best) / _BESIDE
        (_, value), planned = self.prices.best(probs), probs
        for ahead in range(1, 1 + _AHEAD):
            planned = np.concatenate((planned, chance * np.array([best] + [beside] * _BESIDE)))
            if self.prices.best(planned)[1] - ahead * seconds > value:
                return True
            chance *= best
        return False

    def record_pass(self, tokens: int, seconds: float, of_prompt: bool) -> None:
        """Counts a pass over `tokens` new tokens."""
        if tokens <= _FEW_TOKENS:
            self._seconds.append(seconds)
        if not self.counts:
            return
        if of_prompt:
            self._prompt_seconds += seconds
        else:
            self._draft_seconds += seconds

    def record_outcome(
        self, asked: int, accepted: int, best: int, emitted: int, probs: np.ndarray, nodes: int
    ) -> None:
        """Counts what became of a draft.

        Args:
            asked (`int`): The places where the assistant drafted and no other source was right,
            accepted (`int`): those of them where one of its tokens was accepted,
            best (`int`): and those where its best token was.
            emitted (`int`): How many tokens the target's pass yielded.
            probs (`np.ndarray`, float32 of shape `(n,)`): The estimates of other sources' nodes.
            nodes (`int`): How many nodes, of all sources, the target's pass had.
        """
        self._asked = _faded(self._asked, 1.0) + asked
        self._accepted = _faded(self._accepted, _ACCEPTED) + accepted
        self._best_accepted = _faded(self._best_accepted, _BEST_ACCEPTED) + best
        if self.counts:
            others = min(self.prices.best(probs)[0], nodes)  # without the assistant
            without, taken = self.prices.seconds(np.array([others, nodes]))
            saved = (accepted + _ALLOWANCE * emitted) * self.prices.token_seconds
            self._balance += saved - max(taken - without, 0.0) - self._draft_seconds
            self._draft_seconds = 0.0

    def end_text(self) -> None:
        """Counts what reading the prompt took."""
        self._balance -= self._prompt_seconds + self._draft_seconds
        self._prompt_seconds = self._draft_seconds = 0.0

    @property
    def counts(self) -> bool:
        """Whether time counts: a call that names how many nodes it drafts gets them."""
        return math.isfinite(self.prices.token_seconds)


def _faded(count: float, prior: float) -> float:
    return _MEMORY * count + (1 - _MEMORY) * prior * _PSEUDO_COUNT
