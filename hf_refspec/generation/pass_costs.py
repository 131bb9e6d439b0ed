"""What a forward pass of a model costs over its number of tokens, measured as calls go."""

from __future__ import annotations

import math
from bisect import bisect_right

import numpy as np
import torch
from torch import nn

from ..verification.facts import facts_about_state

# The numbers of tokens of a row in a forward pass whose cost is estimated: the last token and 0, 1,
# 2, 4, ... draft nodes. More of them follow the cost closer, and take longer to know.
PASS_TOKENS = (1, 2, 3, 5, 9, 17, 33, 65)
# Of all rows, where they are packed.
PACKED_TOKENS = (*PASS_TOKENS, 129, 257, 513, 1025)

# All that follows is in logarithms: 0.1 is about ten percent.

# How costs grow from each of `PASS_TOKENS` to the next before anything is measured: on a GPU hardly
# at all; on a CPU a matrix product over one to three tokens waits for the weights, over five to
# nine for the arithmetic, which 16-bit types have more of.
_GROWTH = {
    "cuda": (0.03, 0.01, 0.01, 0.01, 0.02, 0.03, 0.06),
    "16 bits": (0.08, 0.03, 0.02, 0.03, 0.08, 0.16, 0.22),
    "32 bits": (0.10, 0.06, 0.35, 0.25, 0.10, 0.20, 0.30),
}
# How far each of them may be off. More believes the first measurements, less neighbouring numbers.
_GROWTH_ERROR = 0.2
# How far two passes over the same number of tokens differ on a shared machine; the first one over a
# number, which may set up memory or kernels; and the first one of all, which nothing is known to
# compare with: it may have taken many times as long.
_NOISE, _FIRST_NOISE, _VERY_FIRST_NOISE = 0.12, 0.3, 0.6
# A pass that took this many standard deviations longer than expected was disturbed by other load,
# and counts the less the longer it took. Fewer would discard true measurements.
_DISTURBED = 2.0
# How much all costs change together from pass to pass, as texts grow and the machine is shared, and
# each by itself: what was measured long ago is less sure, and tried again if it might pay.
_DRIFT, _OWN_DRIFT = 0.03, 0.002
# A size whose cost is uncertain is assumed cheaper by so many standard deviations, so that it is
# tried where it may be the best: more explores more, less keeps to sizes that were measured.
_OPTIMISM = 0.5


class PassCosts:
    """What a forward pass of a model costs over its number of tokens, measured as it goes.

    A Kalman filter over the logarithms of the costs at `PASS_TOKENS`: what is known of one number
    says something of its neighbours, the more the closer they are, and a change of the machine's
    speed moves all of them."""

    def __init__(
        self,
        growth: tuple[float, ...] = _GROWTH["32 bits"],
        tokens: tuple[int, ...] = PASS_TOKENS,
    ) -> None:
        self.tokens = tokens
        self.passes = [0] * len(tokens)
        self._log_seconds = np.concatenate(([0.0], np.cumsum(growth)))
        self._largest_known = 0
        # Of sums of independent growths: entry (i, j) counts those that i and j have in common.
        common = np.minimum.outer(np.arange(len(tokens)), np.arange(len(tokens)))
        self._drift = _DRIFT**2 + _OWN_DRIFT**2 * np.eye(len(tokens))
        # How long a pass takes at all is not known before the first one.
        self._covariance = 100.0**2 + _GROWTH_ERROR**2 * common

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
        """The most tokens of a row that may be tried now: the next number past the largest known.

        Where each token costs as much as a pass, the first drafts would else cost dozens of passes.
        """
        return self.tokens[min(self._largest_known + 1, len(self.tokens) - 1)]

    def seconds(self) -> np.ndarray:
        """The cost of a pass over each of `tokens`, float64: longer passes are never cheaper.
        Those that are not well known are taken to be cheap, within reason."""
        errors = np.sqrt(np.maximum(self._relative_variance(), 0.0))
        return np.exp(np.maximum.accumulate(self._log_seconds - _OPTIMISM * errors))

    def _relative_variance(self) -> np.ndarray:
        """How unsure each cost is beside the one that is known best: what all have in common does
        not matter for a choice among them."""
        own = self._covariance.diagonal()
        best = int(own.argmin())
        return own + own[best] - 2 * self._covariance[best]


def pass_costs(
    model: nn.Module,
    verification: str,
    rows: int = 1,
    tokens: tuple[int, ...] = PASS_TOKENS,
) -> PassCosts:
    """What is known of a model's forward passes over so many rows, of so many `tokens` each, run in
    this manner (`verification`); kept at the model as it is now."""
    parameter = next(model.parameters())
    threads = torch.get_num_threads()
    key = ("pass costs", parameter.device, verification, rows, tokens, threads)
    facts = facts_about_state(model)
    if key not in facts:
        facts[key] = PassCosts(_expected_growth(parameter, rows, tokens), tokens)
    return facts[key]


def _expected_growth(
    parameter: torch.Tensor, rows: int, tokens: tuple[int, ...]
) -> tuple[float, ...]:
    kind = parameter.device.type
    if kind == "cpu":
        kind = "16 bits" if parameter.element_size() <= 2 else "32 bits"
    costs = np.concatenate(([0.0], np.cumsum(_GROWTH.get(kind, _GROWTH["cuda"]))))
    known = np.log(PASS_TOKENS)
    # What counts is the number of tokens of all rows; past the last one costs grow on as before it.
    of_all = np.log(tokens) + np.log(rows)
    past = np.maximum(of_all - known[-1], 0.0) * (costs[-1] - costs[-2]) / (known[-1] - known[-2])
    return tuple(np.diff(np.interp(of_all, known, costs) + past))
