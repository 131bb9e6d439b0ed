"""The cost of a model's forward pass by its number of tokens, measured as calls go."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict, deque
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch
from torch import nn

from ..kernels.eager_kernels import narrow_dtype, why_inactive
from ..verification.model_memo import memo_of_state

# The numbers of tokens of a pass whose costs are estimated. Each small number is, because libraries
# have kernels for some numbers of rows of a matrix, so that three tokens may take longer than
# eight. Few larger ones are: the first pass over each may compile its kernels.
PASS_TOKENS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64)
# These, and larger numbers for several rows together.
TOKENS = (*PASS_TOKENS, 96, 128, 256, 512, 1024)

# How much the logarithm of a cost grows with each doubling of the tokens, from one to 64, before
# anything is measured: on a GPU hardly at all (on an H100, 64 tokens cost 1.12 times as much as
# one); on a CPU a matrix product over few tokens waits for the weights, over more of them for the
# arithmetic, which 16-bit types have more of.
_GROWTH = {
    "cuda": (0.03, 0.01, 0.01, 0.01, 0.02, 0.06),
    "16 bits": (0.08, 0.05, 0.04, 0.10, 0.17, 0.25),
    "32 bits": (0.20, 0.20, 0.20, 0.15, 0.25, 0.35),
    # With the kernel for narrow products, see `kernels/eager_kernels.py`.
    "16 bits, narrow": (0.00, 0.00, 0.12, 0.27, 0.36, 0.35),
    "32 bits, narrow": (0.17, 0.10, 0.03, 0.30, 0.58, 0.60),
    "8 bits, narrow": (0.28, 0.19, 0.38, 0.55, 0.60, 0.62),
}


@dataclass(frozen=True)
class CostConstants:
    """Numbers of [`~pass_costs.PassCosts`]. Errors, noise and drifts are standard deviations of the
    logarithm of a cost: 0.1 is about ten percent."""

    # Plain steps that a call's drafts may lose in advance, so that it can try them at once.
    advance: float = 1.5
    growth_error: float = 0.2  # of each doubling; more believes the first measurements
    own_error: float = 0.1  # of each size by itself; more infers less from other sizes
    noise: float = 0.12  # of two passes of one size, on a shared machine
    first_noise: float = 0.3  # of the first pass of a size, which may set up memory or kernels
    very_first_noise: float = 1.2  # of the first pass of all, which nothing can be compared with
    # A pass that takes this many standard deviations longer than expected was disturbed by other
    # load, and counts the less the longer it took. Less would discard true measurements.
    disturbed: float = 2.0
    # The change from pass to pass of all costs together (texts grow, the machine is shared) and of
    # each: an old measurement is less sure, and is repeated if the size might pay.
    drift: float = 0.03
    own_drift: float = 0.002
    # The standard deviations by which an uncertain size is assumed cheaper, so that it is tried,
    # and dearer, where the question is whether it is affordable.
    optimism: float = 0.5
    caution: float = 0.5
    # A plain step costs the median of the last ones at texts of a similar length, once a few are
    # known. It is measured again after some passes if they say that it has changed by more.
    plain_steps: int = 5
    few_plain_steps: int = 3
    passes_between: int = 8
    changed: float = 0.3
    # Lengths are similar up to this number of tokens, and from each doubling to the next. From one
    # class of lengths to another all costs may change by this.
    similar_length: int = 1024
    length_change: float = 1.0
    # A pass is padded to a larger size that took less time by this part, in at least these passes.
    padding_gain: float = 0.05
    padding_passes: int = 3


COSTS = CostConstants()


class PassCosts:
    """The cost of a model's forward pass by its number of tokens, of all rows together.

    A Kalman filter over the logarithms of the costs: a measurement of one number informs others,
    the more the closer they are, and a change of the machine's speed moves all of them. Plain steps
    are also measured by themselves. `growth` is what each doubling of the tokens is expected to add
    to the logarithm before anything is measured.
    """

    def __init__(self, growth: tuple[float, ...] = _GROWTH["32 bits"]) -> None:
        self.passes = [0] * len(TOKENS)
        doublings = np.log2(np.array(TOKENS))
        expected = np.interp(doublings, np.arange(1 + len(growth)), np.cumsum((0.0, *growth)))
        past_last = np.maximum(doublings - len(growth), 0.0)
        self._log_seconds = expected + growth[-1] * past_last
        # The covariance of sums of independent growths: entry (i, j) counts the ones in common.
        common = np.minimum.outer(doublings, doublings)
        alone = np.eye(len(TOKENS))  # each number by itself
        self._drift = COSTS.drift**2 + COSTS.own_drift**2 * alone
        errors = COSTS.growth_error**2 * common + COSTS.own_error**2 * alone
        self._covariance = 100.0**2 + errors  # before the first pass no time is known at all
        self._length = 0  # the `_length_class` of the last pass
        self._since_plain = 0  # passes since the last plain step
        # The plain steps that the drafts of the next call may lose, see `AutoBudget`.
        self.allowance = COSTS.advance
        # The last plain steps, by rows and length.
        self._plain_steps: dict[tuple[int, int], deque[float]] = defaultdict(
            lambda: deque(maxlen=COSTS.plain_steps)
        )

    def record(self, tokens: int, seconds: float, length: int = 0) -> None:
        """Counts a forward pass behind texts of up to `length` tokens."""
        self._since_plain += 1
        length_class = _length_class(length)
        if self._length != length_class:
            self._covariance += COSTS.length_change**2
            self._length = length_class
        i, next_i, part = _between(min(tokens, TOKENS[-1]))
        covariances = (1 - part) * self._covariance[i] + part * self._covariance[next_i]
        variance = (1 - part) * covariances[i] + part * covariances[next_i]
        expected = (1 - part) * self._log_seconds[i] + part * self._log_seconds[next_i]

        if self.passes[i]:
            noise = COSTS.noise**2
        else:
            noise = (COSTS.first_noise if any(self.passes) else COSTS.very_first_noise) ** 2
        surprise = math.log(max(seconds, 1e-9)) - expected
        if surprise > 0:
            noise *= max(1.0, surprise**2 / (COSTS.disturbed**2 * (variance + noise)))
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
        """The cost of a plain step of rows, the longest of this `length`; 0 if nothing is known."""
        steps = self._plain_steps[rows, _length_class(length)]
        if len(steps) >= COSTS.few_plain_steps:
            return median(steps)
        return math.exp(self._log_cost(rows)) if any(self.passes) else 0.0

    def wants_plain_step(self, rows: int, length: int) -> bool:
        """Whether the next step should be a plain one, to be measured. The costs of several rows,
        which come and go, are estimated from each other."""
        steps = self._plain_steps[rows, _length_class(length)]
        if len(steps) < COSTS.few_plain_steps:
            return rows == 1 or not any(self.passes)
        if self._since_plain < COSTS.passes_between or self._length != _length_class(length):
            return False
        return abs(self._log_cost(rows) - math.log(max(median(steps), 1e-9))) > COSTS.changed

    def cheapest(self, tokens: int) -> int:
        """The cheapest measured number of tokens that is no smaller than this one."""
        least = self._log_cost(tokens) - COSTS.padding_gain
        for i in range(bisect_right(TOKENS, tokens), len(TOKENS)):
            if self.passes[i] >= COSTS.padding_passes and self._log_seconds[i] < least:
                tokens = TOKENS[i]
                least = float(self._log_seconds[i])
        return tokens

    def seconds(self, tokens: np.ndarray) -> np.ndarray:
        """The cost of a pass over each of these numbers of tokens, float64. Costs that are not well
        known are assumed to be low, within reason."""
        # Relative to the best known cost: an error that all share does not matter for a choice.
        best = int(self._covariance.diagonal().argmin())
        likely = np.exp(self._log_seconds - COSTS.optimism * self._deviations(best))
        return np.interp(tokens, TOKENS, likely)

    def dearest(self, tokens: np.ndarray) -> np.ndarray:
        """The most that a pass over each of these numbers of tokens may cost, within reason, as a
        multiple of the first of them, float64."""
        first, *_ = _between(int(tokens[0]))
        dear = np.exp(self._log_seconds + COSTS.caution * self._deviations(first))
        return np.interp(tokens, TOKENS, dear) / math.exp(self._log_cost(int(tokens[0])))

    def _log_cost(self, tokens: int) -> float:
        return float(np.interp(tokens, TOKENS, self._log_seconds))

    def _deviations(self, reference: int) -> np.ndarray:
        """The standard deviation of each cost relative to that of a reference."""
        variances = self._covariance.diagonal()
        differences = variances + variances[reference] - 2 * self._covariance[reference]
        return np.sqrt(np.maximum(differences, 0.0))


def _between(tokens: int) -> tuple[int, int, float]:
    """The indices of the two `TOKENS` around a number, and its position between them, 0 to 1."""
    i = bisect_right(TOKENS, tokens) - 1
    next_i = min(i + 1, len(TOKENS) - 1)
    return i, next_i, (tokens - TOKENS[i]) / max(TOKENS[next_i] - TOKENS[i], 1)


def _length_class(length: int) -> int:
    """Texts of one class have a similar length."""
    return (length // COSTS.similar_length).bit_length()


def pass_costs(model: nn.Module, kind_of_pass: str) -> PassCosts:
    """The measured costs of a model's passes of this kind, stored on the model in its state."""
    parameter = next(model.parameters())
    key = ("pass costs", parameter.device, kind_of_pass, torch.get_num_threads(), why_inactive())
    memo = memo_of_state(model)
    if key not in memo:
        kind = parameter.device.type
        if kind == "cpu":
            narrow = narrow_dtype(model)
            if isinstance(narrow, str):
                kind = "16 bits" if parameter.element_size() <= 2 else "32 bits"
            else:
                kind = f"{8 * narrow.itemsize} bits, narrow"
        memo[key] = PassCosts(_GROWTH.get(kind, _GROWTH["cuda"]))
    return memo[key]
