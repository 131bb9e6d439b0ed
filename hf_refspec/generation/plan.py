"""The sizes of a step: how many nodes each row drafts and how deep, which of them are verified, and
how wide the pass is.

No other file decides sizes: [`plan_step`] sets the most nodes of each row and their depth, within
the limits of the call (`draft_limits.py`) and the room in the cache; [`Plan.trim`] keeps the
drafted nodes that pay, and [`Plan.width`] pads their pass. A budget knows what pays: the best nodes
of all rows together, up to the number that yields the most expected tokens per second. A pass over
packed rows costs as much as their tokens; where rows run side by side, all get the same number of
nodes. Estimates may be wrong, so a ledger books what each pass has really gained, and drafts that
could cost a call more than a small part of its time are not verified.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress
from time import perf_counter

import numpy as np

from ..drafting.contract import Call, Drafter, Speed, checked_draft
from ..drafting.tree import MOST_NODES, DraftTree
from ..verification.verifier import Verifier
from .accept import Accepted
from .draft_limits import DraftLimits
from .pass_costs import PASS_TOKENS, TOKENS, PassCosts, pass_costs
from .row import Row

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Drafts:
    """The drafts of a step.

    Attributes:
        trees (`list[DraftTree | None]`): The part of each row's draft that the pass verifies;
            `None` for a row that takes no part in the pass.
        drafted (`list[DraftTree | None]`): The drafts as they were made.
        seconds (`float`): The time that drafting has taken.
    """

    trees: list[DraftTree | None]
    drafted: list[DraftTree | None]
    seconds: float

    @property
    def any(self) -> bool:
        """True if anything is to be verified."""
        return any(tree for tree in self.trees)


@dataclass(frozen=True)
class Plan:
    """The sizes of one step.

    Attributes:
        nodes (`int`): The most nodes that each row drafts.
        depths (`list[int | None]`): The greatest depth of each row's draft, 0 for none; `None` for
            a row that takes no part in the pass.
    """

    rows: Sequence[Row]
    budget: Budget
    limits: DraftLimits
    nodes: int
    depths: list[int | None]

    def trim(self, drafts: Drafts) -> Drafts:
        """The nodes that pay. The first of several ranks decides."""
        began = perf_counter()
        trees = self.budget.trim(self.rows, drafts)
        seconds = drafts.seconds + perf_counter() - began
        if not self.limits.ranks.alone:
            trees = self.limits.ranks.agree(trees)
        return replace(drafts, trees=trees, seconds=seconds)

    def probe(self, drafts: Drafts) -> Drafts:
        """The drafts, or none if a probe shows that the model does not verify them exactly. A probe
        runs before the first draft of a call and at each length at which attention changes, see
        [`DraftLimits.probe`]; most steps have none."""
        rows = zip(self.rows, drafts.trees, strict=True)
        lengths = [len(row.seen) for row, tree in rows if tree is not None]
        if not drafts.any or self.limits.probe(max(lengths)):
            return drafts
        nothing = [None if tree is None else DraftTree.empty() for tree in drafts.trees]
        return replace(drafts, trees=nothing)

    def width(self, drafts: Drafts) -> int | None:
        """The tokens to which the pass is padded; `None` for no more than it needs."""
        if not (isinstance(self.budget, AutoBudget) and self.limits.may_pad):
            return None  # a fixed budget measures no costs
        rows = zip(self.rows, drafts.trees, self.limits.verifier.cached, strict=True)
        sizes = [len(row.seen) - n + len(tree) for row, tree, n in rows if tree is not None]
        return self.budget.width(sum(sizes))


def plan_step(rows: Sequence[Row], budget: Budget, limits: DraftLimits, longest: int = 0) -> Plan:
    """Decides how many nodes each row drafts, and how deep.

    A row that has ended takes no part, unless the call pads nothing and needs it to be as `longest`
    as the others."""
    takes_part = [not row.finished or len(row) < longest for row in rows]
    nodes = 0
    if limits.ranks.is_first:  # it drafts for the others
        entries = limits.verifier.entries
        nodes = min(budget.nodes(rows, takes_part), entries.room(limits.verifier.cached))
    depths: list[int | None] = []
    for i, row in enumerate(rows):
        depth = limits.depth(i, len(row.seen)) if takes_part[i] and nodes > 0 else 0
        if row.draft_end is not None:
            depth = min(depth, row.draft_end - len(row) - 1)  # one token is the target's own
        depths.append(max(depth, 0) if takes_part[i] else None)
    return Plan(rows, budget, limits, nodes, depths)


def draft(rows: Sequence[Row], plan: Plan) -> Drafts:
    """The draft tree of each row, as large and deep as planned."""
    began = perf_counter()
    vocab_size = plan.limits.vocab_size
    trees: list[DraftTree | None] = []
    for row, depth in zip(rows, plan.depths, strict=True):
        tree = None if depth is None else DraftTree.empty()
        if depth:
            call = Call(
                sampling=row.sampling,
                chain=plan.limits.chains,
                depth=depth,
                speed=plan.budget.speed,
                noise=row.noise_ahead(vocab_size) if row.do_sample else None,
            )
            tree = checked_draft(row.drafter, plan.nodes, call, vocab_size).truncated(depth)
        trees.append(tree)
    return Drafts(trees, trees, perf_counter() - began)


@dataclass(frozen=True)
class BudgetConstants:
    """Numbers of [`AutoBudget`]."""

    # The part of the time that drafts may lose, with the advance of `PassCosts` about three plain
    # steps of a call of 100 tokens. A call that ends early loses a larger part.
    loss: float = 0.015
    least_advance: float = 0.5  # a call that fails does not end drafting for good
    # The most plain steps that earlier gains may pay for, twice the dearest pass. Without a limit,
    # a running batch would pay for wrong drafts for as long as right ones came before.
    most_affordable: float = 100.0
    # A pass that takes more than this multiple of its usual time was disturbed by other load: it is
    # booked at its usual time, or, if that is not yet known, at this multiple of the estimate.
    disturbed: float = 2.1
    # The part of the affordable loss that one pass may stake; the pass over the fewest nodes may
    # stake all. More tries longer drafts, less leaves something for others where the first fail.
    stake: float = 0.5
    # After this number of drafts in a row that were not worth verifying, drafting takes this part
    # of the time. Less patience saves time on text that repeats nothing, and misses the first
    # repetition of others; more drafting notices sooner that drafts pay again.
    patience: int = 8
    drafting_fraction: float = 0.005
    # The most that a draft is booked with, in plain steps: an assistant, which reads the prompt for
    # its first draft, has a ledger of its own.
    dearest_draft: float = 0.05
    # A draft must promise this many times the speed of a plain step. More misses small gains, less
    # verifies drafts whose estimates are a little too high.
    margin: float = 1.05
    # A row this far ahead of another is e times less likely to be the last of its call to end. Less
    # leaves the rows that are ahead without drafts sooner.
    lead: float = 4.0
    horizon: float = 8.0  # passes to come in which a row is taken to gain as much as now


BUDGET = BudgetConstants()


class Budget:
    """A fixed number of draft nodes for each row, which the call names."""

    speed: Speed | None = None  # see `Call`: the number is fixed, so costs are not considered

    def __init__(self, max_nodes: int) -> None:
        self.max_nodes = max_nodes  # the most that a row ever drafts

    def nodes(self, rows: Sequence[Row], takes_part: Sequence[bool]) -> int:
        """The most nodes that each row should draft, if these take part in the next pass."""
        return self.max_nodes

    def trim(self, rows: Sequence[Row], drafts: Drafts) -> list[DraftTree | None]:
        """The part of each row's draft that the next pass should verify."""
        return drafts.drafted

    def record(self, rows: Sequence[Row], drafts: Drafts, accepted: Accepted) -> None:
        """Learns which drafts a pass accepted and how long it took; a fixed number learns
        nothing."""


class AutoBudget(Budget):
    """The draft nodes that yield the most expected tokens per second, if any. Passes are logged."""

    def __init__(
        self,
        costs: PassCosts,
        widths: tuple[int, ...] = (),  # that rows are padded to
        packs: bool = False,  # true if rows may verify different numbers of nodes
        waits: bool = False,  # true if one call waits for all rows, above all for the last
    ) -> None:
        super().__init__((widths or PASS_TOKENS)[-1] - 1)
        self._costs = costs
        self._widths = widths
        self._packs = packs
        self._waits = waits
        self._affordable = costs.allowance  # the ledger: plain steps that drafts may lose now
        self._unpaid = 0  # drafts in a row that were not worth verifying
        self._drafting_seconds = 0.0  # the last draft's
        self._spared = 0.0  # seconds that drafting may have taken since then
        # The present step:
        self._drafts = False  # true if rows may draft
        self._plain = 0.0  # seconds of a plain step
        self._length = 0  # tokens of the longest text
        self._rows = 1
        self._active = 1  # rows that take part

    def nodes(self, rows: Sequence[Row], takes_part: Sequence[bool]) -> int:
        """The most nodes that each row should draft. Returns 0 while a plain step is measured or
        drafting is not affordable, and mostly 0 while drafts do not pay."""
        self._rows = len(rows)
        self._active = sum(takes_part)
        self._length = max(len(row.seen) for row in compress(rows, takes_part))
        _, [plain_tokens] = self._passes(0)
        self._plain = self._seconds(plain_tokens)
        paused = self._unpaid >= BUDGET.patience and self._spared < self._drafting_seconds
        self._drafts = (
            not paused
            and self._affordable * self._plain >= self._drafting_seconds
            and not self._costs.wants_plain_step(self._length)
        )
        return self.max_nodes if self._drafts else 0

    def speed(self, probs: np.ndarray, drafting_seconds: float) -> float:
        """See [`Call`]; of a row, if all rows draft alike."""
        best = np.sort(probs)[::-1][: self.max_nodes]
        gains = _sums(np.repeat(best, self._active)) if self._packs else self._active * _sums(best)
        _, speed = self._best_count(gains, self._active * drafting_seconds)
        return speed

    def width(self, tokens: int) -> int:
        """The size to which a pass over this number of tokens of packed rows is padded: the
        cheapest one that is no smaller."""
        return self._costs.cheapest(tokens)

    def trim(self, rows: Sequence[Row], drafts: Drafts) -> list[DraftTree | None]:
        """The nodes of each draft that pay."""
        kept = drafts.drafted
        if any(kept):
            kept = self._trimmed(kept, self._gains(rows, kept))
        if self._drafts:
            self._unpaid = 0 if any(kept) else self._unpaid + 1
            self._drafting_seconds = min(drafts.seconds, BUDGET.dearest_draft * self._plain)
            self._spared = 0.0
        return kept

    def record(self, rows: Sequence[Row], drafts: Drafts, accepted: Accepted) -> None:
        for row, drafted, taken in zip(rows, drafts.drafted, accepted.rows, strict=True):
            if drafted:
                row.drafter.calibration.record(drafted, taken.tokens)
        active = sum(taken.path is not None for taken in accepted.rows)
        emitted = sum(len(taken.tokens) for taken in accepted.rows)
        drafting_seconds = self._drafting_seconds if self._drafts else 0.0
        seconds = accepted.seconds
        pass_tokens = accepted.pass_tokens
        logger.debug("pass over %d tokens: %.4f s, %d new tokens", pass_tokens, seconds, emitted)
        self._costs.record(pass_tokens, seconds, self._length, plain=not drafts.any)
        gained = BUDGET.loss * seconds - drafting_seconds
        if drafts.any:
            # A pass that was disturbed is not the draft's fault.
            usual = self._seconds(pass_tokens)
            most = BUDGET.disturbed * usual
            disturbed = seconds > most and self._costs.knows(pass_tokens)
            booked = usual if disturbed else min(seconds, most)
            gained += emitted / active * self._plain - booked
        if self._plain > 0:
            affordable = self._affordable + gained / self._plain
            self._affordable = min(affordable, BUDGET.most_affordable)
            self._costs.allow(max(self._affordable, BUDGET.least_advance))
        self._spared += BUDGET.drafting_fraction * seconds

    def _trimmed(
        self, drafts: Sequence[DraftTree | None], gains: Sequence[np.ndarray]
    ) -> list[DraftTree | None]:
        """The best nodes of all drafts together, or the same number of nodes of each."""
        all_gains = np.concatenate(gains)
        if self._packs:
            ranks = _ranks(all_gains)
        else:
            ranks = np.concatenate([_ranks(row_gains) for row_gains in gains])
        count, _ = self._best_count(_sums(np.bincount(ranks, weights=all_gains)))
        ends = np.cumsum([len(row_gains) for row_gains in gains])
        masks = np.split(ranks < count, ends[:-1])
        return [
            draft if draft is None or mask.all() else draft.part(mask)
            for draft, mask in zip(drafts, masks, strict=True)
        ]

    def _best_count(self, gains: np.ndarray, drafting_seconds: float = 0.0) -> tuple[int, float]:
        """The best number of nodes to verify, of all rows together if they are packed, else of
        each; and the tokens per second that it is expected to yield.

        Args:
            gains: The tokens that the best 0, 1, 2, ... nodes are expected to gain, `(1 + n,)`.
            drafting_seconds: The time that a pass without nodes would still save.
        """
        counts, tokens = self._passes(len(gains) - 1)
        speed = (self._active + gains[counts]) / (
            self._costs.seconds(tokens, self._length) + drafting_seconds
        )
        speed[0] *= BUDGET.margin
        stakes = np.full(len(counts) - 1, BUDGET.stake)
        stakes[:1] = 1.0
        lost = self._costs.dearest(tokens)[1:] - 1
        speed[1:][lost > stakes * self._affordable] = 0.0  # not affordable
        best = int(speed.argmax())
        return int(counts[best]), float(speed[best])

    def _passes(self, max_count: int) -> tuple[np.ndarray, np.ndarray]:
        """The passes to choose from: their numbers of nodes, 0, `max_count` and those between with
        known costs; and their numbers of tokens, of all rows together."""
        widths = np.array(self._widths or PASS_TOKENS)
        known = np.array(TOKENS) - self._active if self._packs else widths - 1
        counts = np.unique([0, *known[(known > 0) & (known < max_count)], max_count])
        if self._packs:
            return counts, self._active + counts
        width = 1 + counts
        if self._widths:
            width = widths[np.minimum(np.searchsorted(widths, width), len(widths) - 1)]
        return counts, self._rows * width

    def _seconds(self, tokens: int) -> float:
        """The likely cost of a pass over this number of tokens."""
        return float(self._costs.seconds(np.array(tokens), self._length))

    def _gains(self, rows: Sequence[Row], drafts: Sequence[DraftTree | None]) -> list[np.ndarray]:
        """The expected gain of each node of each draft, in tokens of a row; none of a row that
        takes no part.

        Where a call waits for several rows, the last one to end costs a whole pass for each of its
        tokens, and any other only what one more row adds to these passes. A short row that drafts
        little is likely to be the last."""
        estimates = [
            np.empty(0) if draft is None else row.drafter.calibration.calibrated(draft).probs
            for row, draft in zip(rows, drafts, strict=True)
        ]
        takes_part = np.array([draft is not None for draft in drafts])
        count = int(takes_part.sum())
        worth = takes_part.astype(float)
        if self._waits and count > 1:
            lengths = np.array([len(row) for row in rows])
            ahead = lengths + BUDGET.horizon * np.array([probs.sum() for probs in estimates])
            lags = np.minimum(ahead[takes_part].min() - ahead, 0)
            last = takes_part * np.exp(lags / BUDGET.lead)
            fixed = 1.0  # the part of a pass that is the same for fewer rows: all of a rectangle
            if self._packs:
                fixed = min(self._seconds(1) / self._seconds(count), 1.0)
            worth *= (1 - fixed) + fixed * count * last / last.sum()
            worth /= np.sqrt(count)  # the slowest of more rows gains less than their mean
        return [weight * probs for weight, probs in zip(worth, estimates, strict=True)]


def make_budget(
    max_draft_tokens: int | str, drafter: Drafter, verifier: Verifier, waits: bool = False
) -> Budget:
    """The budget that a call asks for, whose passes this verifier runs; whether one call `waits`
    for all rows. `"auto"` does not cut the drafts of a drafter that sets its own length."""
    if not isinstance(max_draft_tokens, str):
        return Budget(max_draft_tokens)
    if drafter.decides_length:
        return Budget(MOST_NODES)
    kind = verifier.kind
    entries = verifier.entries
    costs = pass_costs(verifier.model, f"{kind.name}, {entries.variant}")
    return AutoBudget(costs, widths=kind.widths, packs=entries.packs, waits=waits)


def _ranks(gains: np.ndarray) -> np.ndarray:
    """The rank of each node by its gain, from 0; parents come before equally probable children."""
    ranks = np.empty(len(gains), dtype=np.int64)
    ranks[np.argsort(-gains, kind="stable")] = np.arange(len(gains))
    return ranks


def _sums(gains: np.ndarray) -> np.ndarray:
    """The gain of the first 0, 1, 2, ... of these, float64."""
    return np.concatenate(([0.0], np.cumsum(gains, dtype=float)))
