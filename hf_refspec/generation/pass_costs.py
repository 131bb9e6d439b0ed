"""The cost of a forward pass of a model over its number of tokens, measured as calls go."""

from __future__ import annotations

import math
from bisect import bisect_right

import numpy as np
import torch
from torch import nn

from ..verification.model_memo import memo_of_state

# The numbers of tokens of a pass whose cost is estimated. Small ones each by itself: libraries have
# kernels for some numbers of rows of a matrix, so that three tokens may take longer than eight. Few
# of the larger ones: the first pass over each may compile its kernels.
PASS_TOKENS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64)
# Of all rows, where they are packed.
PACKED_TOKENS = (*PASS_TOKENS, 96, 128, 256, 512, 1024)

# All that follows is in logarithms: 0.1 is about ten percent.

# How costs grow with each doubling of the tokens, from one to 64, before anything is measured: on a
# GPU hardly at all; on a CPU a matrix product over few tokens waits for the weights, over more of
# them for the arithmetic, which 16-bit types have more of.
_GROWTH = {
    "cuda": (0.03, 0.01, 0.01, 0.01, 0.02, 0.06),
    "16 bits": (0.08, 0.05, 0.04, 0.10, 0.17, 0.25),
    "32 bits": (0.20, 0.20, 0.20, 0.15, 0.25, 0.35),
}
# How far each of them may be off, and the cost of each number by itself. More of the first believes
# the first measurements, of the second tells less of other numbers.
_GROWTH_ERROR, _OWN_ERROR = 0.2, 0.1
# How far two passes over the same number of tokens differ on a shared machine; the first one over a
# number, which may set up memory or kernels; and the first one of all, which nothing is known to
# compare with: it may have taken many times as long.
_NOISE, _FIRST_NOISE, _VERY_FIRST_NOISE = 0.12, 0.3, 1.2
# A pass that took this many standard deviations longer than expected was disturbed by other load,
# and counts the less the longer it took. Fewer would discard true measurements.
_DISTURBED = 2.0
# How much all costs change together from pass to pass, as texts grow and the machine is shared, and
# each by itself: what was measured long ago is less sure, and tried again if it might pay.
_DRIFT, _OWN_DRIFT = 0.03, 0.002
# A size whose cost is uncertain is assumed cheaper by this many standard deviations, so that it is
# tried where it may be the best: more explores more, less keeps to sizes that were measured.
_OPTIMISM = 0.5
# A pass is padded to a larger size where that has been measured to take less time by this fraction,
# in at least this many passes.
_WORTH_FILLING, _WELL_KNOWN = 0.05, 3


class PassCosts:
    """The cost of a forward pass of a model over its number of tokens, measured as it goes.

    A Kalman filter over the logarithms of the costs: what is known of one number says something of
    others, the more the closer they are, and a change of the machine's speed moves all of them.

    Args:
        growth (`tuple[float, ...]`): By how much each doubling of the tokens raises the logarithm.
        tokens (`tuple[int, ...]`): The numbers of tokens of a row whose cost is estimated.
        rows (`int`): The rows of each pass.
    """

    def __init__(
        self,
        growth: tuple[float, ...] = _GROWTH["32 bits"],
        tokens: tuple[int, ...] = PASS_TOKENS,
        rows: int = 1,
    ) -> None:
        self.tokens = tokens
        self.passes = [0] * len(tokens)
        self._largest_known = 0
        doublings = np.log2(np.array(tokens) * rows)
        expected = np.interp(doublings, np.arange(1 + len(growth)), np.cumsum((0.0, *growth)))
        past_last = np.maximum(doublings - len(growth), 0.0)
        self._log_seconds = expected + growth[-1] * past_last
        # Of sums of independent growths: entry (i, j) counts those that i and j have in common.
        common = np.minimum.outer(doublings, doublings)
        own = np.eye(len(tokens))
        self._drift = _DRIFT**2 + _OWN_DRIFT**2 * own
        # How long a pass takes at all is not known before the first one.
        self._covariance = 100.0**2 + _GROWTH_ERROR**2 * common + _OWN_ERROR**2 * own

    def record(self, tokens: int, seconds: float) -> None:
        """Counts a forward pass."""
        tokens = min(tokens, self.tokens[-1])
        i = bisect_right(self.tokens, tokens) - 1
        # Between two numbers the logarithm is interpolated.
        next_i = min(i + 1, len(self.tokens) - 1)
        part = (tokens - self.tokens[i]) / max(self.tokens[next_i] - self.tokens[i], 1)
        covariances = (1 - part) * self._covariance[i] + part * self._covariance[next_i]
        variance = (1 - part) * covariances[i] + part * covariances[next_i]
        expected = (1 - part) * self._log_seconds[i] + part * self._log_seconds[next_i]

        first = _FIRST_NOISE if any(self.passes) else _VERY_FIRST_NOISE
        noise = (_NOISE if self.passes[i] else first) ** 2
        surprise = math.log(max(seconds, 1e-9)) - expected
        if surprise > 0:
            noise *= max(1.0, surprise**2 / (_DISTURBED**2 * (variance + noise)))
        gain = covariances / (variance + noise)
        self._log_seconds += gain * surprise
        self._covariance -= np.outer(gain, covariances)
        self._covariance += self._drift
        self.passes[i] += 1
        self._largest_known = max(self._largest_known, i)

    @property
    def plain_seconds(self) -> float:
        """The cost of a pass over the last token alone; 0 before anything is known."""
        return math.exp(self._log_seconds[0]) if any(self.passes) else 0.0

    @property
    def most_tokens(self) -> int:
        """The most tokens of a row that may be tried now: four, or twice as many as are known.

        Where each token costs as much as a pass, the first drafts would else cost dozens of passes.
        """
        following = self.tokens[min(self._largest_known + 1, len(self.tokens) - 1)]
        most = max(4, 2 * self.tokens[self._largest_known])
        return max(following, min(most, self.tokens[-1]))

    def cheapest(self, tokens: int) -> int:
        """The cheapest measured number of tokens that is no smaller than this one."""
        least = float(np.interp(tokens, self.tokens, self._log_seconds)) - _WORTH_FILLING
        for i in range(bisect_right(self.tokens, tokens), self._largest_known + 1):
            if self.passes[i] >= _WELL_KNOWN and self._log_seconds[i] < least:
                tokens, least = self.tokens[i], float(self._log_seconds[i])
        return tokens

    def seconds(self) -> np.ndarray:
        """The cost of a pass over each of `tokens`, float64. Sizes that are not well known are
        taken to be cheap, within reason."""
        # Beside the one that is known best: what all have in common does not matter for a choice.
        own = self._covariance.diagonal()
        best = int(own.argmin())
        variances = own + own[best] - 2 * self._covariance[best]
        return np.exp(self._log_seconds - _OPTIMISM * np.sqrt(np.maximum(variances, 0.0)))


def pass_costs(
    model: nn.Module,
    verification: str,
    rows: int = 1,
    tokens: tuple[int, ...] = PASS_TOKENS,
) -> PassCosts:
    """The measured costs of a model's forward passes over `rows` of these numbers of `tokens`, run
    in this manner (`verification`); kept at the model as it is now."""
    parameter = next(model.parameters())
    threads = torch.get_num_threads()
    key = ("pass costs", parameter.device, verification, rows, tokens, threads)
    memo = memo_of_state(model)
    if key not in memo:
        kind = parameter.device.type
        if kind == "cpu":
            kind = "16 bits" if parameter.element_size() <= 2 else "32 bits"
        memo[key] = PassCosts(_GROWTH.get(kind, _GROWTH["cuda"]), tokens, rows)
    return memo[key]
