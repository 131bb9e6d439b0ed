"""What a forward pass of a model costs over its number of tokens, measured as calls go."""

from __future__ import annotations

import math
from bisect import bisect_right
from itertools import accumulate

import numpy as np
import torch
from torch import nn

from ..verification.facts import facts_about

# The numbers of tokens of a row in a forward pass whose cost is measured: the last token and 0, 1,
# 2, 4, ... draft nodes. More of them follow the cost closer, and take longer to know.
PASS_TOKENS = (1, 2, 3, 5, 9, 17, 33, 65)
# How much a new measurement counts: more follows changes sooner, and noise as well.
_NEWEST = 0.2
# A pass that took longer than this many times the known cost counts as that: others use the
# machine. Higher believes a model that has become slower sooner.
_SLOWEST = 1.5
# Plain passes that come first: what they cost is what all else is compared with. More of them make
# that surer, and begin to draft later.
_PLAIN_PASSES = 3
# The next number tried is at most so many places in `PASS_TOKENS` past the largest that is known:
# where each token costs as much as a pass, the first drafts would else cost dozens of passes.
_REACH = 3
# A cost that was high because others used the machine must be tried again: one that was measured n
# times (10 count at most) decays to half of it in 16 n^2 passes without another measurement.
_HALF_LIFE, _MOST_MEASURED = 16, 10


class PassCosts:
    """What a forward pass of a model costs over its number of tokens, measured as it goes.

    Of each number of tokens the faster of the first two passes counts: the first may set up memory
    or kernels, and others may use the machine. A number between two that have been measured is
    taken to cost what the smaller one does, so that it is tried as soon as it could pay. Past the
    largest, costs are taken to grow on as a power of the number of tokens.
    """

    def __init__(self) -> None:
        # Lists: a few numbers after each pass, for which arrays would take longer.
        self.passes = [0] * len(PASS_TOKENS)
        self._seconds = [0.0] * len(PASS_TOKENS)
        self._first = [math.inf] * len(PASS_TOKENS)  # the faster of the first two
        self._last = [0] * len(PASS_TOKENS)  # which pass of all was the last of each
        self._count = 0
        self._largest_known = 0

    def record(self, tokens: int, seconds: float) -> None:
        """Counts a forward pass.

        Args:
            tokens (`int`): The tokens of a row in it.
            seconds (`float`): How long it took, until the next token was known.
        """
        # What lies between two numbers counts as the smaller one: too dear rather than too cheap.
        i = bisect_right(PASS_TOKENS, tokens) - 1
        decayed = self._decayed(i)
        self._count += 1
        self.passes[i] += 1
        self._last[i] = self._count
        if self.passes[i] < 3:
            self._first[i] = min(self._first[i], seconds)
            if self.passes[i] == 2:
                self._seconds[i] = self._first[i]
                self._largest_known = max(self._largest_known, i)
            return
        # As far as the old one has decayed, the new measurement is believed at once.
        known = min(max(seconds, decayed), self._seconds[i])
        change = min(seconds / known, _SLOWEST)
        self._seconds[i] = known * (1 + _NEWEST * (change - 1))

    @property
    def plain_seconds(self) -> float:
        """The cost of a pass over the last token alone."""
        return self._seconds[0]

    @property
    def most_tokens(self) -> int:
        """The most tokens of a row that may be tried now: 1 until plain passes are known."""
        if self.passes[0] < _PLAIN_PASSES:
            return 1
        return PASS_TOKENS[min(self._largest_known + _REACH, len(PASS_TOKENS) - 1)]

    def seconds(self) -> np.ndarray:
        """The cost of a pass over each of `PASS_TOKENS`, float64."""
        largest = self._largest_known
        # A longer pass is never cheaper; what has not been measured is 0 until here.
        known = list(accumulate(map(self._decayed, range(largest + 1)), max))
        power = 0.0
        if largest > 0 and known[0] > 0:
            power = math.log(known[-1] / known[0]) / math.log(PASS_TOKENS[largest])
        past = [
            known[-1] * (tokens / PASS_TOKENS[largest]) ** power
            for tokens in PASS_TOKENS[largest + 1 :]
        ]
        return np.array(known + past)

    def _decayed(self, i: int) -> float:
        measured = min(max(self.passes[i], 1), _MOST_MEASURED)
        half_lives = (self._count - self._last[i]) / (_HALF_LIFE * measured**2)
        return self._seconds[i] * 2.0**-half_lives


def pass_costs(model: nn.Module, verification: str, rows: int = 1) -> PassCosts:
    """What is known of a model's forward passes, kept at the model.

    Args:
        model (`nn.Module`): The target model.
        verification (`str`): The name of the verifier.
        rows (`int`, *optional*, defaults to 1): How many texts there are in a pass.
    """
    parameter = next(model.parameters())
    threads = torch.get_num_threads()
    key = ("pass costs", parameter.device, parameter.dtype, verification, rows, threads)
    return facts_about(model).setdefault(key, PassCosts())
