"""The cost of a forward pass of a model over its number of tokens, measured as calls go."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict, deque
from statistics import median

import numpy as np
import torch
from torch import nn

from ..verification.model_memo import memo_of_state
from ..verification.narrow_products import why_unused

# The numbers of tokens of a pass whose cost is estimated. Small ones each by itself: libraries have
# kernels for some numbers of rows of a matrix, so that three tokens may take longer than eight. Few
# of the larger ones: the first pass over each may compile its kernels.
PASS_TOKENS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64)
# Of all rows together.
TOKENS = (*PASS_TOKENS, 96, 128, 256, 512, 1024)

# The most plain steps that the drafts of the next call may lose in advance, so that it may try them
# from the first pass on. More try more.
ADVANCE = 1.5

# All that follows is in logarithms: 0.1 is about ten percent.

# How costs grow with each doubling of the tokens, from one to 64, before anything is measured: on a
# GPU hardly at all, which is assumed; on a CPU a matrix product over few tokens waits for the
# weights, over more of them for the arithmetic, which 16-bit types have more of.
_GROWTH = {
    "cuda": (0.03, 0.01, 0.01, 0.01, 0.02, 0.06),
    "16 bits": (0.08, 0.05, 0.04, 0.10, 0.17, 0.25),
    "32 bits": (0.20, 0.20, 0.20, 0.15, 0.25, 0.35),
    # With the kernel for narrow products, see `verification/narrow_products.py`.
    "16 bits, narrow": (0.00, 0.00, 0.12, 0.27, 0.36, 0.35),
    "32 bits, narrow": (0.10, 0.08, 0.14, 0.28, 0.40, 0.35),
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
# tried where it may be the best: more explores more, less keeps to sizes that were measured. What
# is affordable is asked of a cost that is higher by `_CAUTION` of them.
_OPTIMISM, _CAUTION = 0.5, 0.5
# A plain step costs the median of the last `_PLAIN_STEPS` at texts of a similar length, once this
# many are known. One in `_AGAIN` passes is measured again where the others say that it costs this
# much more or less now.
_PLAIN_STEPS, _FEW_STEPS, _CHANGED, _AGAIN = 5, 3, 0.3, 8
# Texts are of a similar length up to this many tokens, and from each doubling to the next; from one
# length to another, the logarithms of all costs may change by this.
_SIMILAR, _LENGTH_CHANGE = 1024, 1.0
# A pass is padded to a larger size where that has been measured to take less time by this fraction,
# in at least this many passes.
_WORTH_FILLING, _WELL_KNOWN = 0.05, 3


class PassCosts:
    """The cost of a forward pass of a model over its number of tokens, of all rows together,
    measured as it goes.

    A Kalman filter over the logarithms of the costs: what is known of one number says something of
    others, the more the closer they are, and a change of the machine's speed moves all of them.
    Plain steps are measured by themselves.

    Args:
        growth (`tuple[float, ...]`): By how much each doubling of the tokens raises the logarithm.
    """

    def __init__(self, growth: tuple[float, ...] = _GROWTH["32 bits"]) -> None:
        self.passes = [0] * len(TOKENS)
        doublings = np.log2(np.array(TOKENS))
        expected = np.interp(doublings, np.arange(1 + len(growth)), np.cumsum((0.0, *growth)))
        past_last = np.maximum(doublings - len(growth), 0.0)
        self._log_seconds = expected + growth[-1] * past_last
        # Of sums of independent growths: entry (i, j) counts those that i and j have in common.
        common = np.minimum.outer(doublings, doublings)
        own = np.eye(len(TOKENS))
        self._drift = _DRIFT**2 + _OWN_DRIFT**2 * own
        # How long a pass takes at all is not known before the first one.
        self._covariance = 100.0**2 + _GROWTH_ERROR**2 * common + _OWN_ERROR**2 * own
        self._length = 0  # of the texts of the last pass, see `_length_class`
        self._since_plain = 0  # passes since the last plain step
        # How many plain steps the next call's drafts may lose, see `AutoBudget`.
        self.allowance = ADVANCE
        # The last plain steps, by rows and length.
        self._plain_steps: dict[tuple[int, int], deque[float]] = defaultdict(
            lambda: deque(maxlen=_PLAIN_STEPS)
        )

    def record(self, tokens: int, seconds: float, length: int = 0) -> None:
        """Counts a forward pass behind texts of up to `length` tokens."""
        self._since_plain += 1
        if self._length != (length := _length_class(length)):
            self._covariance += _LENGTH_CHANGE**2
            self._length = length
        i, next_i, part = _between(min(tokens, TOKENS[-1]))
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

    def record_plain_step(self, rows: int, length: int, seconds: float) -> None:
        """Counts a step over the last token of each of these rows alone."""
        self._plain_steps[rows, _length_class(length)].append(seconds)
        self._since_plain = 0

    def plain_seconds(self, rows: int, length: int) -> float:
        """The cost of a plain step of these rows, the longest of this length; 0 before anything is
        known."""
        steps = self._plain_steps[rows, _length_class(length)]
        if len(steps) >= _FEW_STEPS:
            return median(steps)
        return math.exp(self._log_cost(rows)) if any(self.passes) else 0.0

    def wants_plain_step(self, rows: int, length: int) -> bool:
        """Whether the next step should be a plain one, to be measured. Numbers of several rows,
        which come and go, are estimated from each other."""
        steps = self._plain_steps[rows, _length_class(length)]
        if len(steps) < _FEW_STEPS:
            return rows == 1 or not any(self.passes)
        if self._since_plain < _AGAIN or self._length != _length_class(length):
            return False
        return abs(self._log_cost(rows) - math.log(max(median(steps), 1e-9))) > _CHANGED

    def cheapest(self, tokens: int) -> int:
        """The cheapest measured number of tokens that is no smaller than this one."""
        least = self._log_cost(tokens) - _WORTH_FILLING
        for i in range(bisect_right(TOKENS, tokens), len(TOKENS)):
            if self.passes[i] >= _WELL_KNOWN and self._log_seconds[i] < least:
                tokens, least = TOKENS[i], float(self._log_seconds[i])
        return tokens

    def seconds(self, tokens: np.ndarray) -> np.ndarray:
        """The cost of a pass over each of these numbers of tokens, float64. Those that are not well
        known are taken to be cheap, within reason."""
        # Beside the one that is known best: what all have in common does not matter for a choice.
        best = int(self._covariance.diagonal().argmin())
        likely = np.exp(self._log_seconds - _OPTIMISM * self._deviations(best))
        return np.interp(tokens, TOKENS, likely)

    def dearest(self, tokens: np.ndarray) -> np.ndarray:
        """What a pass over each of these numbers of tokens may cost, as a multiple of the first of
        them, float64."""
        first, *_ = _between(int(tokens[0]))
        dear = np.exp(self._log_seconds + _CAUTION * self._deviations(first))
        return np.interp(tokens, TOKENS, dear) / math.exp(self._log_cost(int(tokens[0])))

    def _log_cost(self, tokens: int) -> float:
        return float(np.interp(tokens, TOKENS, self._log_seconds))

    def _deviations(self, reference: int) -> np.ndarray:
        """The standard deviation of each cost beside that of a reference."""
        own = self._covariance.diagonal()
        variances = own + own[reference] - 2 * self._covariance[reference]
        return np.sqrt(np.maximum(variances, 0.0))


def _between(tokens: int) -> tuple[int, int, float]:
    """The two of `TOKENS` that a number is between, and how far it is from the first to the
    second."""
    i = bisect_right(TOKENS, tokens) - 1
    next_i = min(i + 1, len(TOKENS) - 1)
    return i, next_i, (tokens - TOKENS[i]) / max(TOKENS[next_i] - TOKENS[i], 1)


def _length_class(length: int) -> int:
    """Texts of one class have a similar length."""
    return (length // _SIMILAR).bit_length()


def pass_costs(model: nn.Module, kind_of_pass: str) -> PassCosts:
    """The measured costs of a model's forward passes of this kind, kept at the model as it is
    now."""
    parameter = next(model.parameters())
    narrow = why_unused(parameter) is None
    key = ("pass costs", parameter.device, kind_of_pass, torch.get_num_threads(), narrow)
    memo = memo_of_state(model)
    if key not in memo:
        kind = parameter.device.type
        if kind == "cpu":
            kind = "16 bits" if parameter.element_size() <= 2 else "32 bits"
            kind += ", narrow" if narrow else ""
        memo[key] = PassCosts(_GROWTH.get(kind, _GROWTH["cuda"]))
    return memo[key]
