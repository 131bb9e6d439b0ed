"""How many draft nodes pay for themselves: expected tokens against the cost of a forward pass."""

from __future__ import annotations

import threading
from bisect import bisect_right
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn

from .calibration import Calibration
from .drafter import Drafter
from .tree import DraftTree

# The numbers of tokens in a forward pass whose cost is measured: the last token and 0, 1, 2, 4, ...
# draft nodes.
PASS_TOKENS = (1, 2, 3, 5, 9, 17, 33, 65)
MOST_NODES = PASS_TOKENS[-1] - 1
# How much a new measurement counts, and how slow one may be to be believed: others use the machine.
NEWEST = 0.2
SLOWEST = 1.5
# Plain passes come first: what they cost is what all else is compared with.
PLAIN_PASSES = 3
# What has not been measured for long is taken to have become cheaper, so that it is tried again.
FORGETTING = 0.9998
# After so many drafts in a row that did not pay, they are made so rarely that they take this share
# of the time, and at least one in so many passes.
PATIENCE = 8
DRAFTING_SHARE = 0.005
LONGEST_REST = 32
# A draft must promise to be so much faster than none, or estimates that are a little too high make
# it slower.
MARGIN = 1.02


class PassCosts:
    """What a forward pass of a model costs over its number of tokens, measured as it goes.

    Of each number of tokens the faster of the first two passes counts: the first may set up memory
    or kernels, and others may use the machine. A number that has not been measured is taken to cost
    what the next smaller one does, so that it is tried as soon as it could pay.
    """

    def __init__(self) -> None:
        self.passes = np.zeros(len(PASS_TOKENS), dtype=np.int64)
        self._seconds = np.zeros(len(PASS_TOKENS), dtype=np.float64)
        self._first = np.full(len(PASS_TOKENS), np.inf)  # the faster of the first two

    def record(self, tokens: int, seconds: float) -> None:
        """Counts a forward pass.

        Args:
            tokens (`int`): The tokens in it.
            seconds (`float`): How long it took, until the next token was known.
        """
        # What lies between two numbers counts as the smaller one: too dear rather than too cheap.
        i = bisect_right(PASS_TOKENS, tokens) - 1
        self.passes[i] += 1
        if self.passes[i] < 3:
            self._first[i] = min(self._first[i], seconds)
            self._seconds[i] = self._first[i] if self.passes[i] == 2 else 0.0
            return
        change = min(seconds / self._seconds[i], SLOWEST)
        self._seconds *= FORGETTING
        self._seconds[i] *= (1 + NEWEST * (change - 1)) / FORGETTING

    @property
    def plain_seconds(self) -> float:
        """The cost of a pass over the last token alone."""
        return float(self._seconds[0])

    def seconds(self) -> np.ndarray:
        """The cost of a pass over each of `PASS_TOKENS`, float64."""
        # A longer pass is never cheaper; what has not been measured is 0 until here.
        return np.maximum.accumulate(self._seconds)


_costs: WeakKeyDictionary[nn.Module, dict[tuple, PassCosts]] = WeakKeyDictionary()
_costs_lock = threading.Lock()


def pass_costs(model: nn.Module, verification: str) -> PassCosts:
    """What is known of a model's forward passes; kept as long as the model.

    Args:
        model (`nn.Module`): The target model.
        verification (`str`): How drafts are verified.
    """
    parameter = next(model.parameters())
    key = (parameter.device, parameter.dtype, verification, torch.get_num_threads())
    with _costs_lock:
        return _costs.setdefault(model, {}).setdefault(key, PassCosts())


class Budget:
    """The number of draft nodes that the call has named.

    Args:
        nodes (`int`): The number.
    """

    def __init__(self, nodes: int) -> None:
        self._nodes = nodes

    @property
    def most(self) -> int:
        """The most nodes to draft now."""
        return self._nodes

    def trim(self, draft: DraftTree, drafting_seconds: float = 0.0) -> DraftTree:
        """The part of a draft that is worth verifying: all of it."""
        return draft

    def record(self, draft: DraftTree, tokens: np.ndarray, seconds: float) -> None:
        """Learns from a forward pass: nothing."""


class Rest:
    """Whether to draft at all: where drafts have not paid for long, only now and then."""

    def __init__(self) -> None:
        self._unpaid = 0  # drafts in a row of which nothing was worth verifying
        self._passes = 0  # passes since the last of them
        self._drafting_seconds = 0.0  # what that one took

    def over(self, pass_seconds: float) -> bool:
        """Whether to draft now, where a pass without a draft takes `pass_seconds`."""
        spared = self._passes * DRAFTING_SHARE * pass_seconds
        return (
            self._unpaid < PATIENCE
            or spared >= self._drafting_seconds
            or self._passes >= LONGEST_REST
        )

    def record_draft(self, paid: bool, seconds: float) -> None:
        """Is told of a draft, which took so long."""
        self._unpaid = 0 if paid else self._unpaid + 1
        self._passes = 0
        self._drafting_seconds = seconds

    def record_pass(self) -> None:
        """Is told that a pass is over."""
        self._passes += 1


class AutoBudget(Budget):
    """As many draft nodes as give the most expected tokens per second, none if none pay.

    Args:
        costs ([`PassCosts`]): Of the target model.
        calibration ([`Calibration`]): Of the drafter.
    """

    def __init__(self, costs: PassCosts, calibration: Calibration) -> None:
        super().__init__(MOST_NODES)
        self._costs = costs
        self._calibration = calibration
        self._drafted = DraftTree.empty()
        self._rest = Rest()

    @property
    def most(self) -> int:
        """The most nodes to draft now: where drafts have not paid for long, mostly none."""
        return super().most if self._rest.over(self._costs.plain_seconds) else 0

    def trim(self, draft: DraftTree, drafting_seconds: float = 0.0) -> DraftTree:
        """The nodes of a draft that pay.

        Args:
            draft ([`DraftTree`]): At most `most` nodes.
            drafting_seconds (`float`, *optional*, defaults to 0.0): How long it took to draft them.
        """
        kept = self._paying(draft) if len(draft) else draft
        self._drafted = draft
        if self.most > 0:
            self._rest.record_draft(len(kept) > 0, drafting_seconds)
        return kept

    def _paying(self, draft: DraftTree) -> DraftTree:
        calibrated = self._calibration.calibrated(draft)
        # Parents stand before their children, also where they are equally probable.
        order = np.argsort(-calibrated.probs, kind="stable")
        expected = np.concatenate(([1.0], 1.0 + np.cumsum(calibrated.probs[order], dtype=float)))
        nodes = self._most_expected_per_second(expected)
        if nodes >= len(draft):
            return draft
        kept = np.zeros(len(draft), dtype=np.bool_)
        kept[order[:nodes]] = True
        return draft.part(kept)

    def record(self, draft: DraftTree, tokens: np.ndarray, seconds: float) -> None:
        """Learns from a forward pass.

        Args:
            draft ([`DraftTree`]): What was verified.
            tokens (`np.ndarray`, int64 of shape `(m,)`): What came out.
            seconds (`float`): How long it took.
        """
        if len(self._drafted):
            self._calibration.record(self._drafted, tokens)
        self._costs.record(1 + len(draft), seconds)
        self._rest.record_pass()
        self._drafted = DraftTree.empty()

    def _most_expected_per_second(self, expected: np.ndarray) -> int:
        """The best number of nodes; `expected[n]` tokens come of n nodes."""
        if self._costs.passes[0] < PLAIN_PASSES:
            return 0
        sizes = np.minimum(np.array(PASS_TOKENS) - 1, len(expected) - 1)
        speed = expected[sizes] / np.interp(sizes + 1, PASS_TOKENS, self._costs.seconds())
        speed[0] *= MARGIN
        return int(sizes[speed.argmax()])


def make_budget(
    max_draft_tokens: int | str, drafter: Drafter, model: nn.Module, verification: str
) -> Budget:
    """The budget that a call asks for.

    Args:
        max_draft_tokens (`int` or `"auto"`): The call's option.
        drafter ([`Drafter`]): What drafts; one that decides itself how long its drafts are is not
            cut by `"auto"`.
        model (`nn.Module`): The target model.
        verification (`str`): How drafts are verified.
    """
    if isinstance(max_draft_tokens, int):
        return Budget(max_draft_tokens)
    if drafter.decides_length:
        return Budget(np.iinfo(np.int32).max)
    return AutoBudget(pass_costs(model, verification), drafter.calibration)
