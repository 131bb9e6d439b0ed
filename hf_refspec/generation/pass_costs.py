"""The cost of a model's forward pass by its number of tokens, measured as calls go."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict, deque
from dataclasses import dataclass
from statistics import median, median_low

import numpy as np
import torch
from torch import nn

from ..kernels.pass_kernels import narrow_dtype, why_inactive
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
    # With the kernel for narrow products, see `kernels/pass_kernels.py`.
    "16 bits, narrow": (0.00, 0.00, 0.12, 0.27, 0.36, 0.35),
    "32 bits, narrow": (0.17, 0.10, 0.03, 0.30, 0.58, 0.90),
    "8 bits, narrow": (0.28, 0.19, 0.38, 0.55, 0.60, 0.62),
}


@dataclass(frozen=True)
class CostConstants:
    """Numbers of [`~pass_costs.PassCosts`]."""

    # Plain steps that a call's drafts may lose in advance, so that it can try them at once.
    advance: float = 1.5
    # A plain step costs the median of this number of the last ones at texts of a similar length.
    # More of them are measured where as many passes say that all costs have changed by this part.
    plain_steps: int = 3
    changed: float = 0.3
    # A size costs the median of this number of its last passes. It forgets one of them after this
    # number of passes of any size, so that a size that has looked dear is tried again.
    passes: int = 15
    forgets_after: int = 512
    # A cost that is not measured differs by this part from what the nearest measured size says, for
    # one doubling between them; by its square root for more. It is assumed that much cheaper, so
    # that it is tried, and dearer, where the question is whether it is affordable.
    error: float = 0.08
    # Lengths are similar up to this number of tokens, and from each doubling to the next.
    similar_length: int = 1024
    # After this number of passes a size is known: passes are padded to it where that takes less
    # time by this part.
    known_passes: int = 3
    padding_gain: float = 0.05


COSTS = CostConstants()
_DOUBLINGS = np.log2(np.array(TOKENS))


class PassCosts:
    """The cost of a model's forward pass by its number of tokens, of all rows together.

    A pass over one token costs the median of the last plain steps, and any other size the median of
    its last passes, counted in such steps. One pass more at the cost that is expected anyway keeps
    a single one, which other load or a compilation has slowed down, from changing it. Sizes that
    are not measured cost as much more or less than expected as those around them. `growth` is what
    each doubling of the tokens is expected to add to the logarithm of the cost.
    """

    def __init__(self, growth: tuple[float, ...] = _GROWTH["32 bits"]) -> None:
        expected = np.interp(_DOUBLINGS, np.arange(1 + len(growth)), np.cumsum((0.0, *growth)))
        past_last = np.maximum(_DOUBLINGS - len(growth), 0.0)
        # Logarithms of costs in passes over one token: as expected, as the passes of each size
        # differed from that, and as estimated now; and the error of the latter.
        self._expected = expected + growth[-1] * past_last
        self._excess = [deque[float](maxlen=COSTS.passes) for _ in TOKENS]
        # By the class of the length, the logarithms of seconds of a pass over one token.
        self._steps: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=COSTS.plain_steps))
        # How much more the last passes of known sizes took than expected.
        self._surprises = deque([0.0] * COSTS.plain_steps, COSTS.plain_steps)
        self.passes = 0
        # The plain steps that the drafts of the next call may lose, see `AutoBudget`.
        self.allowance = COSTS.advance
        self._estimate()

    def record(self, tokens: int, seconds: float, length: int = 0, plain: bool = False) -> None:
        """Counts a pass after texts of up to `length` tokens; a `plain` one had no draft."""
        steps = self._steps[_length_class(length)]
        taken = math.log(max(seconds, 1e-9))
        cost = self._log_cost(tokens)
        if steps:
            relative = taken - median_low(steps)
            if self.knows(tokens):
                self._surprises.append(relative - cost)
            if tokens > 1:
                expected = float(np.interp(tokens, TOKENS, self._expected))
                self._excess[_size(tokens)].append(relative - expected)
        if plain:
            steps.append(taken - cost)
        self.passes += 1
        if self.passes % COSTS.forgets_after == 0:
            for excess in self._excess:
                if excess:
                    excess.popleft()
        self._estimate()

    def allow(self, lost: float) -> None:
        """Lets the drafts of the next call lose this number of plain steps, within the advance."""
        self.allowance = min(lost, COSTS.advance)

    def wants_plain_step(self, length: int) -> bool:
        """True if the next step should be a plain one, to be measured."""
        known = len(self._steps[_length_class(length)])
        return known < COSTS.plain_steps or abs(median(self._surprises)) > COSTS.changed

    def knows(self, tokens: int) -> bool:
        """True if passes over this number of tokens, or a little fewer, are well known."""
        return tokens == 1 or len(self._excess[_size(tokens)]) >= COSTS.known_passes

    def seconds(self, tokens: np.ndarray, length: int) -> np.ndarray:
        """The cost of a pass over each of these numbers of tokens, float64; 0 if nothing is known.

        Costs that are not measured are assumed to be low, within reason. `length` is the
        longest text's.
        """
        steps = self._steps[_length_class(length)]
        step = math.exp(median_low(steps)) if steps else 0.0
        return step * np.interp(tokens, TOKENS, np.exp(self._log_costs - self._errors))

    def dearest(self, tokens: np.ndarray) -> np.ndarray:
        """The most that passes may cost, within reason, as multiples of the first, float64."""
        dear = np.interp(tokens, TOKENS, np.exp(self._log_costs + self._errors))
        return dear / math.exp(self._log_cost(int(tokens[0])))

    def cheapest(self, tokens: int) -> int:
        """The cheapest measured number of tokens that is no smaller than this one."""
        least = self._log_cost(tokens) - COSTS.padding_gain
        for i in range(bisect_right(TOKENS, tokens), len(TOKENS)):
            if self.knows(TOKENS[i]) and self._log_costs[i] < least:
                tokens = TOKENS[i]
                least = float(self._log_costs[i])
        return tokens

    def _estimate(self) -> None:
        measured = [0, *(i for i, excess in enumerate(self._excess) if excess)]
        medians = [median_low((0.0, *self._excess[i])) for i in measured]
        places = _DOUBLINGS[measured]
        self._log_costs = self._expected + np.interp(_DOUBLINGS, places, medians)
        distances = np.abs(np.subtract.outer(_DOUBLINGS, places)).min(axis=1)
        self._errors = COSTS.error * np.sqrt(distances)

    def _log_cost(self, tokens: int) -> float:
        return float(np.interp(tokens, TOKENS, self._log_costs))


def _size(tokens: int) -> int:
    """The index of the largest of `TOKENS` that is no larger than this number."""
    return bisect_right(TOKENS, tokens) - 1


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
