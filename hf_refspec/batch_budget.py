"""How many draft nodes a row of a batch gets: one number for all rows.

A forward pass is as wide as the widest row, so that what a pass costs goes by the number of nodes
of a row and by the number of rows, and its yield is the sum of what all rows may expect.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import nn

from .drafting.budget import (
    MARGIN,
    MOST_NODES,
    PASS_TOKENS,
    PLAIN_PASSES,
    PassCosts,
    Rest,
    pass_costs,
)
from .drafting.drafter import Drafter
from .drafting.tree import DraftTree


class BatchBudget:
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


class AutoBatchBudget(BatchBudget):
    """As many draft nodes a row as give the most expected tokens per second, none if none pay.

    Args:
        model (`nn.Module`): The target model.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(MOST_NODES)
        self._model = model
        self._costs_by_rows: dict[int, PassCosts] = {}
        self._drafters: Sequence[Drafter] = []
        self._drafts: list[DraftTree] = []
        self._rest = Rest()

    @property
    def most(self) -> int:
        """The most nodes that a row should draft now: where drafts have not paid for long, mostly
        none."""
        over = self._rest.over(self._costs(len(self._drafts)).plain_seconds)
        return super().most if over else 0

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
        drafted = self.most > 0
        self._drafters, self._drafts = drafters, drafts
        kept = self._paying(drafters, drafts) if any(map(len, drafts)) else drafts
        if drafted:
            self._rest.record_draft(any(map(len, kept)), drafting_seconds)
        return kept

    def _paying(self, drafters: Sequence[Drafter], drafts: list[DraftTree]) -> list[DraftTree]:
        sizes = np.array(PASS_TOKENS) - 1
        expected = np.zeros(len(sizes))
        orders = []
        for drafter, draft in zip(drafters, drafts, strict=True):
            probs = drafter.calibration.calibrated(draft).probs
            # Parents stand before their children, also where they are equally probable.
            order = np.argsort(-probs, kind="stable")
            sums = np.concatenate(([1.0], 1.0 + np.cumsum(probs[order], dtype=float)))
            expected += sums[np.minimum(sizes, len(draft))]
            orders.append(order)
        nodes = self._best(expected, widest=max(map(len, drafts)))
        return [_first(draft, order[:nodes]) for draft, order in zip(drafts, orders, strict=True)]

    def _best(self, expected: np.ndarray, widest: int) -> int:
        """The best number of nodes; `expected` tokens come of `PASS_TOKENS` - 1 nodes a row."""
        costs = self._costs(len(self._drafts))
        if costs.passes[0] < PLAIN_PASSES:
            return 0
        sizes = np.minimum(np.array(PASS_TOKENS) - 1, widest)
        speed = expected / np.interp(sizes + 1, PASS_TOKENS, costs.seconds())
        speed[0] *= MARGIN
        return int(sizes[speed.argmax()])

    def record(self, new_tokens: Sequence[np.ndarray | None], tokens: int, seconds: float) -> None:
        """Learns from a forward pass.

        Args:
            new_tokens (sequence of `np.ndarray`): What came out for each row; `None` where the row
                took no part.
            tokens (`int`): The tokens of a row in the pass, the last token among them.
            seconds (`float`): How long it took.
        """
        for drafter, draft, emitted in zip(self._drafters, self._drafts, new_tokens, strict=True):
            if emitted is not None and len(draft):
                drafter.calibration.record(draft, emitted)
        self._costs(len(self._drafts)).record(tokens, seconds)
        self._rest.record_pass()

    def _costs(self, rows: int) -> PassCosts:
        if rows not in self._costs_by_rows:
            self._costs_by_rows[rows] = pass_costs(self._model, f"{rows} rows")
        return self._costs_by_rows[rows]


def make_batch_budget(
    max_draft_tokens: int | str, drafter: Drafter, model: nn.Module
) -> BatchBudget:
    """The budget that a call asks for.

    Args:
        max_draft_tokens (`int` or `"auto"`): The call's option.
        drafter ([`Drafter`]): What drafts; one that decides itself how long its drafts are is not
            cut by `"auto"`.
        model (`nn.Module`): The target model.
    """
    if isinstance(max_draft_tokens, int):
        return BatchBudget(max_draft_tokens)
    return BatchBudget(np.iinfo(np.int32).max) if drafter.decides_length else AutoBatchBudget(model)


def _first(draft: DraftTree, nodes: np.ndarray) -> DraftTree:
    if len(nodes) == len(draft):
        return draft
    kept = np.zeros(len(draft), dtype=np.bool_)
    kept[nodes] = True
    return draft.part(kept)
