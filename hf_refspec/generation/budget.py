"""How many draft nodes are verified: those that pay, as far as the call can afford to be wrong.

The best nodes of all rows together are verified, up to the number that gives the most expected
tokens per second. A pass over packed rows costs what their tokens cost; where rows stand side by
side, all get the same number of nodes. Estimates may be wrong, so that a ledger books what each
pass has really gained: drafts that could take a call more than a small part of its time are not
verified.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from ..drafting.drafter import Drafter, Speed
from ..drafting.tree import DraftTree
from ..verification.verifier import Verifier
from .pass_costs import ADVANCE, PASS_TOKENS, TOKENS, PassCosts, pass_costs
from .step import Step

logger = logging.getLogger(__name__)

# The part of the time that drafts may lose, beside what is granted in advance (`ADVANCE`): together
# about three plain steps of a call of 100 tokens. A call that ends early loses a larger part.
_LOSS = 0.015
# A call may always lose this part of a plain step, so that one that fails does not end drafting.
_LEAST_ADVANCE = 0.5
# What drafts have gained is remembered up to this number of plain steps, twice the dearest pass:
# a running batch would otherwise pay for wrong drafts for as long as right ones came before.
_MOST_AFFORDABLE = 100.0
# A pass counts as at most this multiple of its usual cost.
_DISTURBED = 2.0
# One pass may lose this part of what is left of that, but the one over the fewest nodes all of it:
# more tries longer drafts, less leaves something for others where the first ones fail.
_STAKE = 0.5
# After this number of drafts in a row that were not worth verifying, drafting takes this part of
# the time. A smaller number saves time on text that repeats nothing, and misses the first
# repetition of others; more drafting notices sooner that drafts pay again.
_PATIENCE, _DRAFTING_FRACTION = 8, 0.005
# A draft is booked with this part of a plain step at most: an assistant reads the prompt for its
# first one, which is no reason to give up what comes of it, and has a ledger of its own.
_DEAREST_DRAFT = 0.05
# A draft must promise to be faster than none by this factor: higher loses what pays little, lower
# verifies drafts whose estimates are a little too high.
_MARGIN = 1.05
# A row that is `_LEAD` tokens ahead of another row of its call is e times less likely to be the
# last to end. A smaller number leaves the rows that are ahead without drafts sooner. A row is taken
# to gain as much as now in `_HORIZON` passes to come. A larger number spares rows that draft well,
# which will be ahead.
_LEAD, _HORIZON = 4.0, 8.0


class Budget:
    """The number of draft nodes of a row that the call has named."""

    speed: Speed | None = None  # see `Call`: the number is fixed, so costs are not considered

    def __init__(self, nodes: int) -> None:
        self.most = nodes  # that a row ever drafts

    def nodes(self, steps: Sequence[Step]) -> int:
        """The most nodes that each of these rows should draft for the next pass."""
        return self.most

    def padded_size(self, tokens: int) -> int:
        """The size to which a pass over this number of tokens of packed rows is padded."""
        return tokens

    def trim(self, steps: Sequence[Step], drafting_seconds: float) -> list[DraftTree]:
        """The parts of the rows' drafts that are worth verifying in the next pass: all of them, or
        the best nodes."""
        return [step.draft for step in steps]

    def record(self, steps: Sequence[Step], pass_tokens: int, seconds: float) -> None:
        """Learns what became of the drafts of a pass over `pass_tokens` of all rows, padding among
        them, that took these seconds until the next tokens were known."""
        for step in steps:
            if step.path is not None and len(step.draft):
                step.row.drafter.calibration.record(step.draft, step.emitted)


class AutoBudget(Budget):
    """As many draft nodes as give the most expected tokens per second, none if none pay.

    `costs` are those of the target model's passes, at the `widths` that a row is padded to, if it
    is; a row's nodes cost what they cost by themselves if it `packs` rows. Where one call `waits`
    for several rows, gains count less, and most those of rows that are behind. Each pass is logged
    at level DEBUG.
    """

    def __init__(
        self,
        costs: PassCosts,
        widths: tuple[int, ...] | None = None,
        packs: bool = False,
        waits: bool = False,
    ) -> None:
        super().__init__((widths or PASS_TOKENS)[-1] - 1)
        self._costs, self._widths, self._packs, self._waits = costs, widths, packs, waits
        # The ledger: how many plain steps may be lost now, by what drafts have gained and lost, and
        # by how long passes took.
        self._affordable = costs.allowance
        # How many drafts in a row were not worth verifying, what the last draft took, and what
        # drafting may have taken since then.
        self._unpaid, self._drafting_seconds, self._spared = 0, 0.0, 0.0
        # Of the present step: whether there are drafts, a plain step's seconds, the tokens of the
        # longest text, and how many rows there are and take part.
        self._drafts, self._plain, self._length, self._rows = False, 0.0, 0, (1, 1)

    def nodes(self, steps: Sequence[Step]) -> int:
        """As above; none where a plain step is to be measured, where drafting is not affordable,
        and mostly none while drafts do not pay."""
        going = [step for step in steps if not step.is_idle]
        self._rows = len(steps), len(going)
        self._length = max(len(step.row.seen) for step in going)
        self._plain = self._costs.plain_seconds(len(going), self._length)
        paused = self._unpaid >= _PATIENCE and self._spared < self._drafting_seconds
        self._drafts = (
            not paused
            and self._affordable * self._plain >= self._drafting_seconds
            and not self._costs.wants_plain_step(len(going), self._length)
        )
        return self.most if self._drafts else 0

    def speed(self, probs: np.ndarray, drafting_seconds: float) -> float:
        """See [`Call`]; of a row, if all rows draft alike."""
        best, (_, going) = np.sort(probs)[: -1 - self.most : -1], self._rows
        sums = _sums(np.repeat(best, going)) if self._packs else going * _sums(best)
        return self._best(sums, going * drafting_seconds)[1]

    def padded_size(self, tokens: int) -> int:
        """The cheapest size of at least this number of tokens."""
        return self._costs.cheapest(tokens)

    def trim(self, steps: Sequence[Step], drafting_seconds: float) -> list[DraftTree]:
        """The nodes of each draft that pay."""
        kept = (
            self._paying(steps)
            if any(len(step.draft) for step in steps)
            else super().trim(steps, 0)
        )
        if self._drafts:
            self._unpaid = 0 if any(map(len, kept)) else self._unpaid + 1
            dearest = _DEAREST_DRAFT * self._plain
            self._drafting_seconds, self._spared = min(drafting_seconds, dearest), 0.0
        return kept

    def _paying(self, steps: Sequence[Step]) -> list[DraftTree]:
        drafts = [step.draft for step in steps]
        gains = self._gains(steps)
        if self._packs:
            owners = np.repeat(np.arange(len(steps)), [len(draft) for draft in drafts])
            nodes = np.concatenate([np.arange(len(draft)) for draft in drafts])
            together = np.concatenate(gains)
            order = _best_first(together)
            best = order[: self._best(_sums(together[order]))[0]]
            return [_part(draft, nodes[best[owners[best] == i]]) for i, draft in enumerate(drafts)]
        orders = [_best_first(each) for each in gains]
        sums = np.zeros(1 + max(map(len, drafts)))
        for step, each, order in zip(steps, gains, orders, strict=True):
            if not step.is_idle:
                own = _sums(each[order])
                sums += own[np.minimum(np.arange(len(sums)), len(order))]
        count, _ = self._best(sums)
        return [_part(draft, order[:count]) for draft, order in zip(drafts, orders, strict=True)]

    def _best(self, sums: np.ndarray, drafting_seconds: float = 0.0) -> tuple[int, float]:
        """How many nodes to verify, of all rows together if it packs them, else of each, where the
        best k are expected to gain `sums[k]` tokens; and the expected tokens per second, where
        `drafting_seconds` may still be saved. Tried are the numbers whose costs are known, and all;
        none is affordable whose pass may lose too much."""
        (rows, going), most = self._rows, len(sums) - 1
        sizes = np.array(TOKENS if self._packs else self._widths or PASS_TOKENS)
        sizes -= going if self._packs else 1
        nodes = np.unique([0, *sizes[(sizes > 0) & (sizes < most)], most])
        tokens = going + nodes if self._packs else rows * (1 + nodes)
        if self._widths is not None:
            widths = np.array(self._widths)
            tokens = rows * widths[np.minimum(np.searchsorted(widths, 1 + nodes), len(widths) - 1)]
        speed = (going + sums[nodes]) / (self._costs.seconds(tokens) + drafting_seconds)
        speed[0] *= _MARGIN
        stakes = np.full(len(nodes) - 1, _STAKE)
        stakes[:1] = 1.0
        lost = self._costs.dearest(tokens)[1:] - 1
        speed[1:][lost > stakes * self._affordable] = 0.0
        best = int(speed.argmax())
        return int(nodes[best]), float(speed[best])

    def record(self, steps: Sequence[Step], pass_tokens: int, seconds: float) -> None:
        """Learns what became of the drafts and what the pass cost."""
        super().record(steps, pass_tokens, seconds)
        going = sum(step.path is not None for step in steps)
        emitted = sum(len(step.emitted) for step in steps)
        drafting_seconds = self._drafting_seconds if self._drafts else 0.0
        logger.debug("pass over %d tokens: %.4f s, %d new tokens", pass_tokens, seconds, emitted)
        self._costs.record(pass_tokens, seconds, self._length)
        gained = _LOSS * seconds - drafting_seconds
        if any(len(step.verified) for step in steps):
            # A pass that was disturbed is not the draft's fault.
            [usual] = self._costs.seconds(np.array([pass_tokens]))
            gained += emitted / going * self._plain - min(seconds, _DISTURBED * float(usual))
        else:
            self._costs.record_plain_step(going, self._length, seconds)
        if self._plain > 0:
            self._affordable = min(self._affordable + gained / self._plain, _MOST_AFFORDABLE)
            self._costs.allowance = min(max(self._affordable, _LEAST_ADVANCE), ADVANCE)
        self._spared += _DRAFTING_FRACTION * seconds

    def _gains(self, steps: Sequence[Step]) -> list[np.ndarray]:
        """The expected gain of each node of each draft, in tokens of a row.

        Where a call waits for several rows, the last one to end costs a whole pass for each of its
        tokens, and any other only what one more row adds to these passes. The last one is that
        which is behind and drafts little."""
        estimates = [step.row.drafter.calibration.calibrated(step.draft).probs for step in steps]
        going = np.array([not step.is_idle for step in steps])
        count = int(going.sum())
        if not self._waits or count <= 1:
            return estimates
        lengths = np.array([len(step.row) for step in steps])
        ahead = lengths + _HORIZON * np.array([each.sum() for each in estimates])
        last = going * np.exp(np.minimum(ahead[going].min() - ahead, 0) / _LEAD)
        fixed = 1.0  # the part of a pass that is the same for fewer rows: all of a rectangle
        if self._packs:
            one, all_rows = self._costs.seconds(np.array([1, count]))
            fixed = min(one / all_rows, 1.0)
        worth = (1 - fixed) + fixed * count * last / last.sum()
        worth /= np.sqrt(count)  # the slowest of more rows gains less than their mean
        return [each * probs for each, probs in zip(worth, estimates, strict=True)]


def make_budget(
    max_draft_tokens: int | str, drafter: Drafter, verifier: Verifier, waits: bool = False
) -> Budget:
    """The budget that a call asks for, whose passes this verifier runs; whether one call `waits`
    for all rows. `"auto"` does not cut a drafter that decides itself how long its drafts are."""
    if isinstance(max_draft_tokens, int):
        return Budget(max_draft_tokens)
    if drafter.decides_length:
        return Budget(np.iinfo(np.int32).max)
    kind = verifier.kind
    entries = verifier.entries
    costs = pass_costs(verifier.model, f"{kind.name}, {entries.variant}")
    return AutoBudget(costs, kind.widths, entries.packs, waits)


def _best_first(gains: np.ndarray) -> np.ndarray:
    # Parents stand before their children, also where they are equally probable.
    return np.argsort(-gains, kind="stable")


def _sums(gains: np.ndarray) -> np.ndarray:
    """The expected gain of none, one, two, ... of these nodes."""
    return np.concatenate(([0.0], np.cumsum(gains, dtype=float)))


def _part(draft: DraftTree, nodes: np.ndarray) -> DraftTree:
    if len(nodes) == len(draft):
        return draft
    kept = np.zeros(len(draft), dtype=np.bool_)
    kept[nodes] = True
    return draft.part(kept)
