"""How many draft nodes pay for themselves: expected tokens against the cost of a forward pass.

A pass over packed rows costs what their tokens cost, so that the best nodes of all rows together
are verified: a row that drafts well, or one that the others wait for, gets more. Where rows make a
rectangle, a pass is as wide as its widest row, and all rows get the same number of nodes.
"""

from __future__ import annotations

import logging
import sys
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cache, partial

import numpy as np
from torch import nn

from ..drafting.drafter import Drafter
from ..drafting.payoff import Prices
from ..drafting.tree import DraftTree
from .pass_costs import PACKED_TOKENS, PASS_TOKENS, PassCosts, pass_costs
from .row import Row

logger = logging.getLogger(__name__)

# A draft must promise to be so much faster than none: higher loses what pays little, lower verifies
# drafts whose estimates are a little too high.
_MARGIN = 1.05
# Drafting pauses after this number of drafts in a row that did not pay, or of steps of several
# rows, which take longer. A smaller number saves time on text that repeats nothing, and misses the
# first repetition of others.
_PATIENCE, _ROWS_PATIENCE = 8, 3
# In a pause, drafting may take this fraction of the time, and happens once in `_LONGEST_PAUSE`
# passes at least. More drafting notices sooner that drafts pay again.
_DRAFTING_FRACTION, _LONGEST_PAUSE = 0.005, 32
# With each pass, the weight of earlier ones in the time per token falls by this factor.
_RECENT = 0.9
# A row that is `_LEAD` tokens ahead of another row of its call is e times less likely to be the
# last to end. A smaller number leaves the rows that are ahead without drafts sooner. A row is taken
# to gain as much as now in `_HORIZON` passes to come. A larger number spares rows that draft well,
# which will be ahead.
_LEAD, _HORIZON = 4.0, 8.0


class Budget:
    """The number of draft nodes of a row that the call has named."""

    def __init__(self, nodes: int) -> None:
        self.most = nodes  # that a row ever drafts

    @property
    def nodes(self) -> int:
        """The most nodes that a row should draft now."""
        return self.most

    def prices(self) -> Prices:
        """The user fixed the number of nodes, so the cost of drafting is not considered."""
        return Prices()

    def padded_size(self, tokens: int) -> int:
        """The size to which a pass over this number of tokens of packed rows is padded."""
        return tokens

    def trim(
        self, rows: Sequence[Row], drafting_seconds: float, room: int = sys.maxsize
    ) -> list[DraftTree]:
        """The parts of the drafts that are worth verifying in the next pass, which has `room` for
        nodes: all of them, or the best ones."""
        drafts = [row.draft for row in rows]
        if sum(map(len, drafts)) <= room:
            return drafts
        return _best_parts(drafts, _estimates(rows), lambda probs: room)

    def record(self, rows: Sequence[Row], pass_tokens: int | None, seconds: float) -> None:
        """Learns what became of the drafts of a pass over `pass_tokens` of each row, the last token
        among them, that took these seconds until the next tokens were known. The tokens are `None`
        where it ran a prompt as well."""
        for row in rows:
            if row.path is not None and len(row.draft):
                of_all_rows = row.drafter.calibration
                row.calibration.record(of_all_rows.calibrated(row.draft), row.emitted)
                of_all_rows.record(row.draft, row.emitted)


class AutoBudget(Budget):
    """As many draft nodes a row as give the most expected tokens per second, none if none pay.

    `costs` returns those of the target model for a number of rows, at the `widths` that passes are
    padded to, if they are; or, if it `packs` rows, by the tokens of all of them. Where one call
    `waits` for several rows, gains count less, and most those of rows that are behind. Each pass is
    logged at level DEBUG.
    """

    def __init__(
        self,
        costs: Callable[[int], PassCosts],
        widths: tuple[int, ...] | None = None,
        packs: bool = False,
        waits: bool = False,
    ) -> None:
        super().__init__((widths or PASS_TOKENS)[-1] - 1)
        self._packs, self._waits = packs, waits
        self._costs = cache(costs)
        self._padded = widths is not None
        self._pause = _Pause()
        # Of the last passes, with what was drafted for them.
        self._drafting_seconds = self._seconds = self._emitted = 0.0
        self._last = 0, 0, 0  # the last pass: its rows, those of them that took part, its tokens

    @property
    def nodes(self) -> int:
        """As above, but mostly no nodes while drafts do not pay."""
        return 0 if self._pause.lasts else super().nodes

    def prices(self) -> Prices:
        """The time that a token takes at present, drafting and verifying together, but never more
        than without drafts; and what passes take."""
        if self._emitted == 0:
            return Prices(0.0)
        rows, going, tokens = self._last
        costs = self._costs(1 if self._packs else rows)
        plain_seconds = _pass_seconds(costs, going if self._packs else 1) / going
        token_seconds = min(self._seconds / self._emitted, plain_seconds)
        most, others, sharing = costs.most_tokens, 0, going  # rows share what a rectangle takes
        if self._packs:
            most, others, sharing = max(most, going), tokens * (going - 1) // going, 1
        allowed = bisect_right(costs.tokens, most)
        seconds = tuple((costs.seconds()[:allowed] / sharing).tolist())
        return Prices(token_seconds, costs.tokens[:allowed], seconds, others)

    def padded_size(self, tokens: int) -> int:
        """The cheapest size of at least this number of tokens."""
        return self._costs(1).cheapest(tokens)

    def trim(
        self, rows: Sequence[Row], drafting_seconds: float, room: int = sys.maxsize
    ) -> list[DraftTree]:
        """The nodes of each draft that pay."""
        self._drafting_seconds = drafting_seconds
        drafts = [row.draft for row in rows]
        kept = self._paying(rows, room) if any(map(len, drafts)) else drafts
        if not self._pause.lasts:
            self._pause.record_drafts(len(rows), any(map(len, kept)), drafting_seconds)
        return kept

    def record(self, rows: Sequence[Row], pass_tokens: int | None, seconds: float) -> None:
        """Learns what became of the drafts and what the pass cost."""
        super().record(rows, pass_tokens, seconds)
        costs = self._costs(1 if self._packs else len(rows))
        drafting_seconds, self._drafting_seconds = self._drafting_seconds, 0.0
        if pass_tokens is None:
            self._pause.record_pass(costs.plain_seconds)
            return
        emitted = sum(len(row.emitted) for row in rows)
        logger.debug("pass over %d tokens: %.4f s, %d new tokens", pass_tokens, seconds, emitted)
        costs.record(pass_tokens, seconds)
        self._pause.record_pass(costs.plain_seconds)
        self._seconds = _RECENT * self._seconds + seconds + drafting_seconds
        self._emitted = _RECENT * self._emitted + emitted
        self._last = len(rows), sum(row.path is not None for row in rows), pass_tokens

    def _paying(self, rows: Sequence[Row], room: int) -> list[DraftTree]:
        """Of packed rows the best nodes together; in a rectangle as many nodes of each row."""
        costs = self._costs(1 if self._packs else len(rows))
        gains, drafts = self._gains(rows, costs), [row.draft for row in rows]
        if self._packs:
            going = sum(not row.is_idle for row in rows)
            return _best_parts(drafts, gains, lambda best: _paying_nodes(costs, going, best[:room]))
        widest = max(map(len, drafts))
        passes = np.array(costs.tokens)
        passes = passes[passes <= costs.most_tokens]
        passes = passes[: 1 + np.searchsorted(passes, 1 + widest)]  # no wider than it will run
        sizes = np.minimum(passes - 1, widest)
        orders = [_best_first(probs) for probs in gains]
        expected = np.zeros(len(sizes))  # tokens of the rows that go on, by the nodes of each
        for row, probs, order in zip(rows, gains, orders, strict=True):
            if not row.is_idle:
                expected += _sums(1, probs[order])[np.minimum(sizes, len(order))]
        nodes = sizes[_fastest(expected, passes if self._padded else sizes + 1, costs)]
        return [_part(draft, order[:nodes]) for draft, order in zip(drafts, orders, strict=True)]

    def _gains(self, rows: Sequence[Row], costs: PassCosts) -> list[np.ndarray]:
        """The expected gain of each node of each draft, in tokens of a row.

        Where a call waits for several rows, the last one to end costs a whole pass for each of its
        tokens, and any other only what one more row adds to these passes. The last one is that
        which is behind and drafts little."""
        estimates = _estimates(rows)
        going = np.array([not row.is_idle for row in rows])
        count = int(going.sum())
        if not self._waits or count <= 1:
            return estimates
        lengths = np.array([len(row) for row in rows])
        ahead = lengths + _HORIZON * np.array([each.sum() for each in estimates])
        last = going * np.exp(np.minimum(ahead[going].min() - ahead, 0) / _LEAD)
        fixed = 1.0  # the part of a pass that is the same for fewer rows: all of a rectangle
        if self._packs:
            fixed = min(_pass_seconds(costs, 1) / _pass_seconds(costs, count), 1.0)
        worth = (1 - fixed) + fixed * count * last / last.sum()
        worth /= np.sqrt(count)  # the slowest of more rows gains less than their mean
        return [each * probs for each, probs in zip(worth, estimates, strict=True)]


def _best_parts(
    drafts: Sequence[DraftTree],
    gains: Sequence[np.ndarray],
    count: Callable[[np.ndarray], int],
) -> list[DraftTree]:
    """The best nodes of all drafts together, as many as `count` says of their gains, the highest
    first."""
    owners = np.repeat(np.arange(len(drafts)), [len(draft) for draft in drafts])
    nodes = np.concatenate([[], *(np.arange(len(draft)) for draft in drafts)]).astype(np.int64)
    together = np.concatenate([[], *gains])
    order = _best_first(together)
    best = order[: count(together[order])]
    return [_part(draft, nodes[best[owners[best] == i]]) for i, draft in enumerate(drafts)]


def _paying_nodes(costs: PassCosts, rows: int, gains: np.ndarray) -> int:
    """How many of the nodes of all rows, the best first, give the most expected tokens per second;
    a pass costs what its tokens cost. Tried are the numbers whose cost is known, and all nodes."""
    totals = np.array(costs.tokens)
    totals = totals[(totals > rows) & (totals <= min(costs.most_tokens, rows + len(gains)))]
    tokens = np.unique([rows, *totals, min(rows + len(gains), max(costs.most_tokens, rows))])
    return int(tokens[_fastest(_sums(rows, gains)[tokens - rows], tokens, costs)]) - rows


def _best_first(gains: np.ndarray) -> np.ndarray:
    # Parents stand before their children, also where they are equally probable.
    return np.argsort(-gains, kind="stable")


def _sums(first: int, gains: np.ndarray) -> np.ndarray:
    """The expected tokens of a pass with none, one, two, ... of these nodes."""
    return first + np.concatenate(([0.0], np.cumsum(gains, dtype=float)))


def _fastest(expected: np.ndarray, tokens: np.ndarray, costs: PassCosts) -> int:
    """The index of the pass that yields the most expected tokens per second; the first has no
    draft."""
    speed = expected / np.interp(tokens, costs.tokens, costs.seconds())
    speed[0] *= _MARGIN
    return int(speed.argmax())


def _pass_seconds(costs: PassCosts, tokens: int) -> float:
    return float(np.interp(tokens, costs.tokens, costs.seconds()))


class _Pause:
    """Whether to draft at all: where drafts have not paid for long, only now and then."""

    def __init__(self) -> None:
        self._unpaid = 0  # drafts in a row of which nothing was worth verifying
        self._patience = _PATIENCE
        self._passes = 0  # passes since the last of them
        self._plain_seconds = 0.0  # what one without a draft takes
        self._drafting_seconds = 0.0  # what the last draft took

    @property
    def lasts(self) -> bool:
        spared = self._passes * _DRAFTING_FRACTION * self._plain_seconds
        return (
            self._unpaid >= self._patience
            and spared < self._drafting_seconds
            and self._passes < _LONGEST_PAUSE
        )

    def record_drafts(self, rows: int, paid: bool, seconds: float) -> None:
        """Counts the drafts of a step of `rows`, which took these seconds."""
        self._unpaid = 0 if paid else self._unpaid + 1
        self._patience = _ROWS_PATIENCE if rows > 1 else _PATIENCE
        self._passes = 0
        self._drafting_seconds = seconds

    def record_pass(self, plain_seconds: float) -> None:
        """Counts a pass, of which one without a draft takes so long."""
        self._passes += 1
        self._plain_seconds = plain_seconds


def make_budget(
    max_draft_tokens: int | str,
    drafter: Drafter,
    model: nn.Module,
    kind_of_pass: str,
    widths: tuple[int, ...] | None = None,
    packs: bool = False,
    waits: bool = False,
) -> Budget:
    """The budget that a call asks for, where a verifier runs passes of this kind, padded to these
    `widths`, or `packs` rows, for all of which the call `waits`. `"auto"` does not cut a drafter
    that decides itself how long its drafts are."""
    if isinstance(max_draft_tokens, int):
        return Budget(max_draft_tokens)
    if drafter.decides_length:
        return Budget(np.iinfo(np.int32).max)
    costs = partial(pass_costs, model, kind_of_pass)
    if packs or widths is not None:
        costs = partial(costs, tokens=PACKED_TOKENS if packs else widths)
    return AutoBudget(costs, widths, packs, waits)


def _estimates(rows: Sequence[Row]) -> list[np.ndarray]:
    """How likely each node is accepted, by what became of all rows' drafts; and of several rows by
    what became of their own, since a row is behind whose drafts failed."""
    drafts = [row.drafter.calibration.calibrated(row.draft) for row in rows]
    if len(rows) > 1:
        pairs = zip(rows, drafts, strict=True)
        drafts = [row.calibration.calibrated(draft) for row, draft in pairs]
    return [draft.probs for draft in drafts]


def _part(draft: DraftTree, nodes: np.ndarray) -> DraftTree:
    if len(nodes) == len(draft):
        return draft
    kept = np.zeros(len(draft), dtype=np.bool_)
    kept[nodes] = True
    return draft.part(kept)
