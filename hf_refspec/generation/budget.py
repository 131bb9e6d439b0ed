"""The budget of a call: a number of nodes, or for `max_draft_tokens="auto"` the nodes that pay.

[`AutoBudget`] keeps the best nodes of all rows together, up to the number that yields the most
expected tokens per second. A pass over packed rows costs as much as their tokens; where rows run
side by side, all get the same number of nodes. Estimates may be wrong, so a ledger books what each
pass has really gained, and drafts that could cost a call more than a small part of its time are not
verified. [`PassCosts`] are measured as calls go.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, median_low
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import nn

from ..drafting.contract import Drafter
from ..drafting.tree import MOST_NODES, DraftTree
from ..kernels.pass_kernels import narrow_dtype, why_inactive
from ..verification.model_memo import memo_of_state
from ..verification.verifier import Verifier
from .row import Row

logger = logging.getLogger(__name__)

# The numbers of tokens of a pass whose costs are estimated. Every small number is listed, because
# libraries have kernels for particular numbers of rows of a matrix, so that three tokens may take
# longer than eight. Few larger ones are: the first pass over each may compile its kernels.
PASS_TOKENS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64)
# The same, and larger numbers that occur only where several rows share a pass.
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
    """Numbers of [`PassCosts`]."""

    # Plain steps that a call's drafts may lose in advance, so that it can try them at once.
    advance: float = 1.5
    # A plain step costs the median of this number of the last ones at texts of a similar length.
    # More are measured once as many passes suggest that all costs have shifted by `changed`.
    plain_steps: int = 3
    changed: float = 0.3
    # A size costs the median of this number of its last passes. It forgets one of them after this
    # number of passes of any size, so that a size that has looked dear is tried again.
    passes: int = 15
    forgets_after: int = 512
    # A cost that is not measured is off by this part one doubling away from the nearest measured
    # size, and by more with the square root of the number of doublings. It is assumed that much
    # cheaper, so that it is tried, and dearer where the question is whether it is affordable.
    error: float = 0.08
    # Lengths are similar up to this number of tokens, and from each doubling to the next.
    similar_length: int = 1024
    # A size is known after this number of passes. A pass is padded to a known size that costs less
    # by at least this part.
    known_passes: int = 3
    padding_gain: float = 0.05


COSTS = CostConstants()
_DOUBLINGS = np.log2(np.array(TOKENS))


class PassCosts:
    """The cost of a model's forward pass by its number of tokens, of all rows together.

    A pass over one token costs the median of the last plain steps, and any other size the median of
    its last passes, counted in such steps. One imaginary pass at the expected cost is among them:
    a single one that other load or a compilation has slowed down changes nothing. Sizes that are
    not measured cost as much more or less than expected as their neighbours. `growth` is what each
    doubling of the tokens is expected to add to the logarithm of the cost.
    """

    def __init__(self, growth: tuple[float, ...] = _GROWTH["32 bits"]) -> None:
        expected = np.interp(_DOUBLINGS, np.arange(1 + len(growth)), np.cumsum((0.0, *growth)))
        past_last = np.maximum(_DOUBLINGS - len(growth), 0.0)
        # Logarithms of costs in passes over one token: as expected, as the passes of each size
        # differed from that, and as estimated now.
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

    def seconds(self, tokens: np.ndarray | int, length: int) -> np.ndarray:
        """The cost of a pass over each of these numbers of tokens, float64; 0 if nothing is known.

        Costs that are not measured are assumed to be low, within reason. `length` is the
        longest text's.
        """
        steps = self._steps[_length_class(length)]
        step = math.exp(median_low(steps)) if steps else 0.0
        return step * np.interp(tokens, TOKENS, self._low_costs)

    def dearest(self, tokens: np.ndarray) -> np.ndarray:
        """The most that passes may cost, within reason, as multiples of the first, float64."""
        first = self._log_cost(int(tokens[0]))
        return np.interp(tokens, TOKENS, self._high_costs) / math.exp(first)

    def cheapest(self, tokens: int) -> int:
        """This number of tokens, or a larger measured one if that is cheaper."""
        least = self._log_cost(tokens) - COSTS.padding_gain
        for i in range(bisect_right(TOKENS, tokens), len(TOKENS)):
            if self.knows(TOKENS[i]) and self._log_costs[i] < least:
                tokens = TOKENS[i]
                least = self._log_costs[i]
        return tokens

    def _estimate(self) -> None:
        measured = [0, *(i for i, excess in enumerate(self._excess) if excess)]
        medians = [median_low((0.0, *self._excess[i])) for i in measured]
        places = _DOUBLINGS[measured]
        self._log_costs = self._expected + np.interp(_DOUBLINGS, places, medians)
        distances = np.abs(np.subtract.outer(_DOUBLINGS, places)).min(axis=1)
        errors = COSTS.error * np.sqrt(distances)
        self._low_costs = np.exp(self._log_costs - errors)
        self._high_costs = np.exp(self._log_costs + errors)

    def _log_cost(self, tokens: int) -> float:
        return float(np.interp(tokens, TOKENS, self._log_costs))


def _size(tokens: int) -> int:
    """The index of the last of `TOKENS` up to this number."""
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
    # After `patience` drafts in a row that were not worth verifying, drafting takes no more than
    # `drafting_fraction` of the time. Less patience saves time on text that repeats nothing, and
    # misses the first repetition of others; more drafting notices sooner that drafts pay again.
    patience: int = 8
    drafting_fraction: float = 0.005
    # The most that a draft is booked with, in plain steps: an assistant, which reads the prompt for
    # its first draft, has a ledger of its own.
    dearest_draft: float = 0.05
    # A draft must promise this many times the speed of a plain step. A higher margin misses small
    # gains, a lower one verifies drafts whose estimates are a little too high.
    margin: float = 1.05
    # A row that is this many tokens ahead of another is e times less likely to end last. A smaller
    # lead leaves the rows that are ahead without drafts sooner.
    lead: float = 4.0
    horizon: float = 8.0  # passes to come in which a row is taken to gain as much as now


BUDGET = BudgetConstants()


class BatchShape(NamedTuple):
    """The numbers that the cost of a pass depends on, besides its drafts."""

    rows: int
    active: int  # rows that take part in the pass
    length: int  # tokens of the longest text that takes part


class AutoBudget:
    """The draft nodes that yield the most expected tokens per second, if any. Passes are logged.

    Attributes:
        max_nodes (`int`): The most nodes that a row ever drafts.
        costs ([`PassCosts`]): The measured costs of passes.
    """

    def __init__(
        self,
        costs: PassCosts,
        widths: tuple[int, ...] = (),  # that rows are padded to
        packs: bool = False,  # true if rows may verify different numbers of nodes
        waits: bool = False,  # true if one call waits for all rows, above all for the last
    ) -> None:
        self.max_nodes = (widths or PASS_TOKENS)[-1] - 1
        self.costs = costs
        self._widths = widths
        self._packs = packs
        self._waits = waits
        self._affordable = costs.allowance  # the ledger: plain steps that drafts may lose now
        self._unpaid = 0  # drafts in a row that were not worth verifying
        self._drafting_seconds = 0.0  # the last draft's
        self._spared = 0.0  # seconds that drafting may have taken since then

    def nodes(self, shape: BatchShape) -> int:
        """The most nodes that each row should draft. Returns 0 while a plain step is measured or
        drafting is not affordable, and mostly 0 while drafts do not pay."""
        paused = self._unpaid >= BUDGET.patience and self._spared < self._drafting_seconds
        drafts = (
            not paused
            and self._affordable * self._plain_seconds(shape) >= self._drafting_seconds
            and not self.costs.wants_plain_step(shape.length)
        )
        return self.max_nodes if drafts else 0

    def speed(self, shape: BatchShape, probs: np.ndarray, drafting_seconds: float) -> float:
        """The `speed` of a [`Call`] for nodes with these estimates, float32 `(n,)`, if all rows
        draft alike."""
        best = np.sort(probs)[::-1][: self.max_nodes]
        together = np.cumsum([0.0, *np.repeat(best, shape.active)])
        gains = together if self._packs else shape.active * np.cumsum([0.0, *best])
        _, speed = self._best_count(shape, gains, shape.active * drafting_seconds)
        return speed

    def trim(
        self,
        rows: Sequence[Row],
        drafts: Sequence[DraftTree | None],
        shape: BatchShape,
        drafting_seconds: float,
    ) -> list[DraftTree | None]:
        """The nodes that pay: the best of all drafts together, or the same number of each."""
        kept = [*drafts]
        if any(kept):
            gains = self._gains(rows, kept, shape)
            all_gains = np.concatenate(gains)
            compared = [all_gains] if self._packs else gains
            # Each node's rank from 0; parents come before equally probable children.
            orders = [np.argsort(-each, kind="stable") for each in compared]
            ranks = np.concatenate([np.argsort(order) for order in orders])
            by_rank = np.bincount(ranks, weights=all_gains)
            count, _ = self._best_count(shape, np.cumsum([0.0, *by_rank]))
            masks = np.split(ranks < count, np.cumsum([*map(len, gains)])[:-1])
            kept = [
                draft if draft is None or mask.all() else draft.part(mask)
                for draft, mask in zip(kept, masks, strict=True)
            ]
        dearest = BUDGET.dearest_draft * self._plain_seconds(shape)
        self._unpaid = 0 if any(kept) else self._unpaid + 1
        self._drafting_seconds = min(drafting_seconds, dearest)
        self._spared = 0.0
        return kept

    def record(
        self,
        shape: BatchShape,
        pass_tokens: int,
        seconds: float,
        new_tokens: int,
        *,
        asked: bool,
        verified: bool,
    ) -> None:
        """Learns from a pass over `pass_tokens` tokens, padding included, which took these seconds
        and yielded `new_tokens` in all rows; whether any drafter was asked for it, and whether it
        `verified` a draft."""
        logger.debug("pass over %d tokens: %.4f s, %d new tokens", pass_tokens, seconds, new_tokens)
        plain = self._plain_seconds(shape)
        self.costs.record(pass_tokens, seconds, shape.length, plain=not verified)
        gained = BUDGET.loss * seconds - (self._drafting_seconds if asked else 0.0)
        if verified:
            # A pass that was disturbed is not the draft's fault.
            usual = float(self.costs.seconds(pass_tokens, shape.length))
            most = BUDGET.disturbed * usual
            disturbed = seconds > most and self.costs.knows(pass_tokens)
            booked = usual if disturbed else min(seconds, most)
            gained += new_tokens / shape.active * plain - booked
        if plain > 0:
            affordable = self._affordable + gained / plain
            self._affordable = min(affordable, BUDGET.most_affordable)
            self.costs.allow(max(self._affordable, BUDGET.least_advance))
        self._spared += BUDGET.drafting_fraction * seconds

    def _best_count(
        self, shape: BatchShape, gains: np.ndarray, drafting_seconds: float = 0.0
    ) -> tuple[int, float]:
        """The best number of nodes to verify, of all rows together if they are packed, else of
        each; and the tokens per second that it is expected to yield.

        Args:
            shape: The rows and their texts.
            gains: The tokens that the best 0, 1, 2, ... nodes are expected to gain, `(1 + n,)`.
            drafting_seconds: The time that drafting adds to the pass, whatever its nodes.
        """
        # The passes to choose from: no node, all, and numbers between whose cost is estimated.
        most = len(gains) - 1
        widths = np.array(self._widths or PASS_TOKENS)
        known = np.array(TOKENS) - shape.active if self._packs else widths - 1
        counts = np.unique([0, *known[(known > 0) & (known < most)], most])
        tokens = shape.active + counts if self._packs else shape.rows * (1 + counts)  # of all rows
        if self._widths and not self._packs:
            at = np.minimum(np.searchsorted(widths, 1 + counts), len(widths) - 1)
            tokens = shape.rows * widths[at]
        seconds = self.costs.seconds(tokens, shape.length) + drafting_seconds
        speed = (shape.active + gains[counts]) / seconds
        speed[0] *= BUDGET.margin
        stakes = np.full(len(counts) - 1, BUDGET.stake)
        stakes[:1] = 1.0
        lost = self.costs.dearest(tokens)[1:] - 1
        speed[1:][lost > stakes * self._affordable] = 0.0  # not affordable
        best = int(speed.argmax())
        return int(counts[best]), float(speed[best])

    def _plain_seconds(self, shape: BatchShape) -> float:
        """The likely cost of a plain step."""
        width = self._widths[0] if self._widths else 1
        tokens = shape.active if self._packs else shape.rows * width
        return float(self.costs.seconds(tokens, shape.length))

    def _gains(
        self, rows: Sequence[Row], drafts: Sequence[DraftTree | None], shape: BatchShape
    ) -> list[np.ndarray]:
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
        count = shape.active
        worth = takes_part.astype(float)
        if self._waits and count > 1:
            lengths = np.array([len(row) for row in rows])
            ahead = lengths + BUDGET.horizon * np.array([probs.sum() for probs in estimates])
            lags = np.minimum(ahead[takes_part].min() - ahead, 0)
            last = takes_part * np.exp(lags / BUDGET.lead)
            fixed = 1.0  # the part of a pass that is the same for fewer rows: all of a rectangle
            if self._packs:
                of_one, of_all = self.costs.seconds(np.array([1, count]), shape.length)
                fixed = min(float(of_one / of_all), 1.0)
            worth *= (1 - fixed) + fixed * count * last / last.sum()
            worth /= np.sqrt(count)  # the slowest of more rows gains less than their mean
        return [weight * probs for weight, probs in zip(worth, estimates, strict=True)]


# The number of nodes that a row drafts at most, all of which are verified; or the ones that pay.
Budget: TypeAlias = int | AutoBudget


def make_budget(
    max_draft_tokens: int | str, drafter: Drafter, verifier: Verifier, waits: bool = False
) -> Budget:
    """The budget that a call asks for, whose passes this verifier runs; whether one call `waits`
    for all rows. `"auto"` does not cut the drafts of a drafter that sets its own length."""
    if not isinstance(max_draft_tokens, str):
        return max_draft_tokens
    if drafter.decides_length:
        return MOST_NODES
    kind = verifier.kind
    entries = verifier.entries
    costs = pass_costs(verifier.model, f"{kind.name}, {entries.variant}")
    return AutoBudget(costs, widths=kind.widths, packs=entries.packs, waits=waits)
