"""How many draft nodes pay for themselves: expected tokens against the cost of a forward pass.

A pass of several rows is as wide as the widest of them, so that all rows get the same number of
nodes: what a pass costs goes by it and by the number of rows, and its yield is the sum of what the
rows may expect.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import accumulate
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn

from ..drafting.drafter import Drafter
from ..drafting.tree import DraftTree

# The numbers of tokens of a row in a forward pass whose cost is measured: the last token and 0, 1,
# 2, 4, ... draft nodes.
PASS_TOKENS = (1, 2, 3, 5, 9, 17, 33, 65)
MOST_NODES = PASS_TOKENS[-1] - 1
# How much a new measurement counts, and how slow one may be to be believed: others use the machine.
NEWEST = 0.2
SLOWEST = 1.5
# Plain passes come first: what they cost is what all else is compared with.
PLAIN_PASSES = 3
# The next number tried is at most so many places in `PASS_TOKENS` past the largest that is known:
# where each token costs as much as a pass, the first drafts would else cost dozens of passes.
REACH = 3
# A cost measured n times is taken for half of it after so many passes * n * n without another
# measurement, and so is tried again: it may have been high because others used the machine.
DOUBTED = 16
SURE = 10  # where n ends
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
        doubted = self._doubted(i)
        self._count += 1
        self.passes[i] += 1
        self._last[i] = self._count
        if self.passes[i] < 3:
            self._first[i] = min(self._first[i], seconds)
            if self.passes[i] == 2:
                self._seconds[i] = self._first[i]
                self._largest_known = max(self._largest_known, i)
            return
        # As far as it was doubted, the new measurement is believed at once.
        known = min(max(seconds, doubted), self._seconds[i])
        change = min(seconds / known, SLOWEST)
        self._seconds[i] = known * (1 + NEWEST * (change - 1))

    @property
    def plain_seconds(self) -> float:
        """The cost of a pass over the last token alone."""
        return self._seconds[0]

    @property
    def most_tokens(self) -> int:
        """The most tokens of a row that may be tried now: 1 until plain passes are known."""
        if self.passes[0] < PLAIN_PASSES:
            return 1
        return PASS_TOKENS[min(self._largest_known + REACH, len(PASS_TOKENS) - 1)]

    def seconds(self) -> np.ndarray:
        """The cost of a pass over each of `PASS_TOKENS`, float64."""
        largest = self._largest_known
        # A longer pass is never cheaper; what has not been measured is 0 until here.
        known = list(accumulate(map(self._doubted, range(largest + 1)), max))
        power = 0.0
        if largest > 0 and known[0] > 0:
            power = math.log(known[-1] / known[0]) / math.log(PASS_TOKENS[largest])
        past = [
            known[-1] * (tokens / PASS_TOKENS[largest]) ** power
            for tokens in PASS_TOKENS[largest + 1 :]
        ]
        return np.array(known + past)

    def _doubted(self, i: int) -> float:
        measured = min(max(self.passes[i], 1), SURE)
        return self._seconds[i] * 2.0 ** ((self._last[i] - self._count) / (DOUBTED * measured**2))


_costs: WeakKeyDictionary[nn.Module, dict[tuple, PassCosts]] = WeakKeyDictionary()
_costs_lock = threading.Lock()


def pass_costs(model: nn.Module, verification: str, rows: int = 1) -> PassCosts:
    """What is known of a model's forward passes; kept as long as the model.

    Args:
        model (`nn.Module`): The target model.
        verification (`str`): How drafts are verified.
        rows (`int`, *optional*, defaults to 1): How many texts there are in a pass.
    """
    parameter = next(model.parameters())
    key = (parameter.device, parameter.dtype, verification, rows, torch.get_num_threads())
    with _costs_lock:
        return _costs.setdefault(model, {}).setdefault(key, PassCosts())


class Budget:
    """The number of draft nodes of a row that the call has named.

    Args:
        nodes (`int`): The number.
    """

    def __init__(self, nodes: int) -> None:
        self._nodes = nodes

    @property
    def most(self) -> int:
        """The most nodes that a row should draft now."""
        return self._nodes

    def trim(
        self,
        drafters: Sequence[Drafter],
        drafts: list[DraftTree],
        drafting_seconds: float = 0.0,
    ) -> list[DraftTree]:
        """The parts of the drafts that are worth verifying: all of them."""
        return drafts

    def record(self, new_tokens: Sequence[np.ndarray | None], tokens: int, seconds: float) -> None:
        """Learns from a forward pass: nothing."""


class Rest:
    """Whether to draft at all: where drafts have not paid for long, only now and then."""

    def __init__(self) -> None:
        self._unpaid = 0  # drafts in a row of which nothing was worth verifying
        self._passes = 0  # passes since the last of them
        self._plain_seconds = 0.0  # what one without a draft takes
        self._drafting_seconds = 0.0  # what the last one took

    @property
    def over(self) -> bool:
        """Whether to draft now."""
        spared = self._passes * DRAFTING_SHARE * self._plain_seconds
        return (
            self._unpaid < PATIENCE
            or spared >= self._drafting_seconds
            or self._passes >= LONGEST_REST
        )

    def record_drafts(self, paid: bool, seconds: float) -> None:
        """Is told of drafts, which took so long."""
        self._unpaid = 0 if paid else self._unpaid + 1
        self._passes = 0
        self._drafting_seconds = seconds

    def record_pass(self, plain_seconds: float) -> None:
        """Is told that a pass is over; one without a draft takes so long."""
        self._passes += 1
        self._plain_seconds = plain_seconds


class AutoBudget(Budget):
    """As many draft nodes a row as give the most expected tokens per second, none if none pay.

    Args:
        costs (callable): Gives the [`PassCosts`] of the target model for a number of rows.
    """

    def __init__(self, costs: Callable[[int], PassCosts]) -> None:
        super().__init__(MOST_NODES)
        self._costs = cache(costs)
        self._drafters: Sequence[Drafter] = []
        self._drafts: list[DraftTree] = []
        self._rest = Rest()

    @property
    def most(self) -> int:
        """The most nodes that a row should draft now: where drafts have not paid for long, mostly
        none."""
        return super().most if self._rest.over else 0

    def trim(
        self,
        drafters: Sequence[Drafter],
        drafts: list[DraftTree],
        drafting_seconds: float = 0.0,
    ) -> list[DraftTree]:
        """The nodes of each draft that pay.

        Args:
            drafters (sequence of [`Drafter`]): Of the rows of the forward pass.
            drafts (`list[DraftTree]`): Of the same rows, each of at most `most` nodes.
            drafting_seconds (`float`, *optional*, defaults to 0.0): How long it took to draft them.
        """
        self._drafters, self._drafts = drafters, drafts
        kept = self._paying() if any(map(len, drafts)) else drafts
        if self.most > 0:
            self._rest.record_drafts(any(map(len, kept)), drafting_seconds)
        return kept

    def _paying(self) -> list[DraftTree]:
        sizes = np.array(PASS_TOKENS) - 1
        expected = np.zeros(len(sizes))  # tokens of all rows, by the nodes of a row
        orders = []
        for drafter, draft in zip(self._drafters, self._drafts, strict=True):
            probs = drafter.calibration.calibrated(draft).probs
            # Parents stand before their children, also where they are equally probable.
            order = np.argsort(-probs, kind="stable")
            sums = np.concatenate(([1.0], 1.0 + np.cumsum(probs[order], dtype=float)))
            expected += sums[np.minimum(sizes, len(draft))]
            orders.append(order)
        nodes = self._most_expected_per_second(expected, widest=max(map(len, self._drafts)))
        return [
            _part(draft, order[:nodes]) for draft, order in zip(self._drafts, orders, strict=True)
        ]

    def _most_expected_per_second(self, expected: np.ndarray, widest: int) -> int:
        """The best number of nodes; `expected` tokens come of `PASS_TOKENS` - 1 nodes a row, of
        which no row has drafted more than `widest`."""
        costs = self._costs(len(self._drafts))
        if costs.most_tokens == 1:
            return 0
        sizes = np.minimum(np.array(PASS_TOKENS) - 1, widest)
        sizes = sizes[sizes < costs.most_tokens]
        speed = expected[: len(sizes)] / np.interp(sizes + 1, PASS_TOKENS, costs.seconds())
        speed[0] *= MARGIN
        return int(sizes[speed.argmax()])

    def record(self, new_tokens: Sequence[np.ndarray | None], tokens: int, seconds: float) -> None:
        """Learns from a forward pass.

        Args:
            new_tokens (sequence of `np.ndarray`, int64 of shape `(m,)`): What came out for each
                row; `None` where the row took no part.
            tokens (`int`): The tokens of a row in the pass, the last token among them.
            seconds (`float`): How long it took.
        """
        for drafter, draft, emitted in zip(self._drafters, self._drafts, new_tokens, strict=True):
            if emitted is not None and len(draft):
                drafter.calibration.record(draft, emitted)
        costs = self._costs(len(new_tokens))
        costs.record(tokens, seconds)
        self._rest.record_pass(costs.plain_seconds)


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
    return AutoBudget(partial(pass_costs, model, verification))


def _part(draft: DraftTree, nodes: np.ndarray) -> DraftTree:
    if len(nodes) == len(draft):
        return draft
    kept = np.zeros(len(draft), dtype=np.bool_)
    kept[nodes] = True
    return draft.part(kept)
