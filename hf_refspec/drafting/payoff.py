"""Whether a pass of an assistant model pays: what such passes cost, and what they brought."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import median

# What a pass costs is the median of so many, each over so many new tokens at most.
_PASSES, _FEW_TOKENS = 15, 4
# Before anything is known, this part of a pass's tokens is taken to be accepted, with this weight.
# What is known counts so much less with each pass of the target, so that it is tried again.
_ACCEPTED, _PSEUDO_COUNT, _MEMORY = 0.8, 2.0, 0.98
# An assistant that does not pay may take this part of the time, to notice where it does.
_ALLOWANCE = 0.02


@dataclass(frozen=True, slots=True)
class Prices:
    """What a call's time is worth at present, for drafters that take much of it.

    Attributes:
        token_seconds (`float`): What a token takes, and an accepted one saves: 0 if that is not
            known yet; infinite where the call names how many nodes it drafts.
        node_seconds (`float`): What one node more adds to a pass of the target.
    """

    token_seconds: float = math.inf
    node_seconds: float = 0.0


class Payoff:
    """What the passes of an assistant have cost and brought so far, over all texts.

    A pass pays if the time that its token is expected to save is longer than the pass. Reading what
    it has missed of a text costs more than such a pass: it does so only while it has saved at least
    as much time as it took, the prompt of the present text not counted.

    Attributes:
        prices ([`Prices`]): Of the call, at present.
    """

    def __init__(self) -> None:
        self.prices = Prices()
        self._seconds: deque[float] = deque(maxlen=_PASSES)
        self._accepted, self._asked = _ACCEPTED * _PSEUDO_COUNT, _PSEUDO_COUNT
        self._balance = 0.0  # seconds saved, less those taken
        self._prompt_seconds = 0.0  # of the present text

    def pays(self, chance: float, unread: int) -> bool:
        """Whether to run the assistant.

        Args:
            chance (`float`): That its path is accepted, and that no other source has what follows.
            unread (`int`): How many tokens it would read.
        """
        prices = self.prices
        gain = chance * self._accepted / self._asked * prices.token_seconds
        costs = median(self._seconds) if self._seconds else 0.0
        affords = self._balance >= 0 or unread <= _FEW_TOKENS or not self.counts
        return affords and gain > costs + prices.node_seconds

    def record_pass(self, tokens: int, seconds: float, of_prompt: bool) -> None:
        """Counts a pass that read so many tokens."""
        if tokens <= _FEW_TOKENS:
            self._seconds.append(seconds)
        if not self.counts:
            return
        if of_prompt:
            self._prompt_seconds += seconds
        else:
            self._balance -= seconds

    def record_outcome(self, accepted: int, asked: int, emitted: int) -> None:
        """Counts what became of a draft.

        Args:
            accepted (`int`): How many of its tokens were accepted that no other source had, of
            asked (`int`): so many places where no other source was right.
            emitted (`int`): How many tokens the target's pass yielded.
        """
        self._accepted = self._faded(self._accepted, _ACCEPTED * _PSEUDO_COUNT) + accepted
        self._asked = self._faded(self._asked, _PSEUDO_COUNT) + asked
        if self.counts:
            self._balance += (accepted + _ALLOWANCE * emitted) * self.prices.token_seconds

    def end_text(self) -> None:
        """Counts what reading the prompt took."""
        self._balance -= self._prompt_seconds
        self._prompt_seconds = 0.0

    @property
    def counts(self) -> bool:
        """Whether time counts: a call that names how many nodes it drafts gets them."""
        return math.isfinite(self.prices.token_seconds)

    @staticmethod
    def _faded(count: float, prior: float) -> float:
        return _MEMORY * count + (1 - _MEMORY) * prior
