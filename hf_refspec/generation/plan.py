"""The sizes of a step: how many nodes each row drafts and how deep, which of them are verified, and
how wide the pass is.

No other file decides sizes: [`plan_step`] sets the number of nodes and their depth before anything
is drafted, [`Plan.trim`] keeps the drafted nodes that pay and may pad their pass. Both ask the
call's [`Budget`], which for "auto" is in `budget.py`, and its [`DraftLimits`].

Until a probe allows it, no draft crosses a length at which attention may become another computation
(a window, a chunk). The probe runs when a text that has reached this length has a draft to verify.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress
from time import perf_counter
from typing import NamedTuple

import numpy as np

from ..drafting.contract import Call, Speed, checked_draft
from ..drafting.stats import DraftStats
from ..drafting.tree import DraftTree
from ..refusals import CHANGED, Reason, why_refused
from ..text_config import (
    boundaries,
    context_length,
    length_dependent_rope,
    text_config,
    vocab_size_of,
)
from ..verification.model_memo import Watch
from ..verification.probe import ProbedCall, known_finding
from ..verification.ranks import Ranks
from ..verification.verifier import Verifier
from .row import Row


@dataclass(frozen=True)
class Drafts:
    """The drafts of a step.

    Attributes:
        trees (`list[DraftTree | None]`): The part of each row's draft that the pass verifies;
            `None` for a row that takes no part in the pass.
        drafted (`list[DraftTree | None]`): The drafts as they were made.
        seconds (`float`): The time that drafting has taken.
        width (`int`, *optional*): The tokens to which the pass is padded; `None` for no more than
            it needs.
    """

    trees: list[DraftTree | None]
    drafted: list[DraftTree | None]
    seconds: float
    width: int | None = None


class Step(NamedTuple):
    """The numbers that the cost of a step's pass depends on, besides the draft."""

    rows: int
    active: int  # rows that take part in the pass
    length: int  # tokens of the longest text that takes part


@dataclass(frozen=True)
class Plan:
    """The sizes of one step.

    Attributes:
        nodes (`int`): The most nodes that each row drafts; 0 for a plain step, and for all
            ranks but the first.
        depths (`list[int | None]`): The greatest depth of each row's draft, 0 for none; `None` for
            a row that takes no part in the pass.
    """

    rows: Sequence[Row]
    budget: Budget
    limits: DraftLimits
    step: Step
    nodes: int
    depths: list[int | None]

    def trim(self, drafts: Drafts) -> Drafts:
        """The nodes that pay and the width of their pass; the first of several ranks decides. All
        trees are empty if a probe shows that the model does not verify drafts exactly: one runs
        where no finding is known yet, and at each length at which attention changes, see
        [`DraftLimits.probe`]."""
        began = perf_counter()
        limits = self.limits
        trees = self.budget.trim(self, drafts)
        seconds = drafts.seconds + perf_counter() - began
        if not limits.ranks.alone:
            trees = limits.ranks.agree(trees)
        if any(trees) and not limits.probe(self.step.length):
            trees = [None if tree is None else DraftTree.empty() for tree in trees]
        width = None
        if limits.may_pad:
            passes = zip(self.rows, trees, limits.verifier.cached, strict=True)
            sizes = [len(row.seen) - n + len(tree) for row, tree, n in passes if tree is not None]
            width = self.budget.width(sum(sizes))
        return Drafts(trees, drafts.drafted, seconds, width)


def plan_step(rows: Sequence[Row], budget: Budget, limits: DraftLimits, longest: int = 0) -> Plan:
    """Decides how many nodes each row drafts, and how deep.

    The number of nodes is the least of what the `budget` allows (`max_draft_tokens`; where that is
    "auto", none while drafts do not pay) and of what the cache has room for. The depth ends at the
    `limits` of the call and at the end of each row.

    A row that has ended takes no part, unless the call does not pad and the row is still shorter
    than `longest`."""
    takes_part = [not row.finished or len(row) < longest for row in rows]
    length = max(len(row.seen) for row in compress(rows, takes_part))
    step = Step(len(rows), sum(takes_part), length)
    nodes = 0
    if limits.ranks.is_first:  # it drafts for the others
        room = limits.verifier.entries.room(limits.verifier.cached)
        nodes = min(budget.nodes(step), room)
    depths: list[int | None] = []
    for i, row in enumerate(rows):
        depth = limits.depth(i, len(row.seen)) if takes_part[i] and nodes > 0 else 0
        if row.draft_end is not None:
            depth = min(depth, row.draft_end - len(row) - 1)  # one token is the target's own
        depths.append(max(depth, 0) if takes_part[i] else None)
    return Plan(rows, budget, limits, step, nodes, depths)


def draft(rows: Sequence[Row], plan: Plan) -> Drafts:
    """The draft tree of each row, as large and deep as planned."""
    began = perf_counter()
    vocab_size = plan.limits.vocab_size
    speed = plan.budget.speed(plan.step)
    trees: list[DraftTree | None] = []
    for row, depth in zip(rows, plan.depths, strict=True):
        tree = None if depth is None else DraftTree.empty()
        if depth:
            call = Call(
                sampling=row.sampling,
                chain=plan.limits.chains,
                depth=depth,
                speed=speed,
                noise=row.noise_ahead(vocab_size) if row.do_sample else None,
            )
            tree = checked_draft(row.drafter, plan.nodes, call, vocab_size).truncated(depth)
        trees.append(tree)
    return Drafts(trees, trees, perf_counter() - began)


class Budget:
    """A fixed number of draft nodes for each row, which the call names; whatever passes cost."""

    def __init__(self, max_nodes: int) -> None:
        self.max_nodes = max_nodes  # the most that a row ever drafts

    def nodes(self, step: Step) -> int:
        """The most nodes that each row should draft."""
        return self.max_nodes

    def speed(self, step: Step) -> Speed | None:
        """See [`Call`]."""
        return None

    def trim(self, plan: Plan, drafts: Drafts) -> list[DraftTree | None]:
        """The part of each row's draft that the next pass should verify."""
        return drafts.drafted

    def width(self, tokens: int) -> int:
        """The size to which a pass over this number of tokens of packed rows is padded."""
        return tokens

    def record(
        self,
        plan: Plan,
        drafts: Drafts,
        emitted: Sequence[np.ndarray],
        pass_tokens: int,
        seconds: float,
    ) -> None:
        """Learns from a pass over `pass_tokens` tokens, padding included, which took these seconds
        and after which each row has `emitted` new tokens, int64 `(n,)`."""


class DraftLimits:
    """Limits of the drafts of a call: their depth, their ids, and whether they may branch.

    A verifier that has not been `probed` is probed before its first draft.

    Attributes:
        verifier ([`Verifier`]): Runs the passes.
        chains (`bool`): True if drafts must not branch.
        vocab_size (`int`): The number of ids that a draft may have.
        ranks ([`Ranks`]): The processes that decode one text together; the first one decides.
        refused ([`Reason`], *optional*): Why drafts end at the next length, if they do.
    """

    def __init__(
        self,
        verifier: Verifier,
        stats: DraftStats | None = None,
        rows: int = 1,
        chains: bool = False,
        probed: bool = True,
        ranks: Ranks | None = None,
    ) -> None:
        """`rows` is 2 for any number of several; `stats` count the passes of probes."""
        self.verifier = verifier
        self.chains = chains or not verifier.kind.takes_trees
        self.vocab_size = vocab_size_of(verifier.model)
        self.ranks = Ranks() if ranks is None else ranks
        self.refused: Reason | None = None
        self._watch: Watch | None = None
        config = text_config(verifier.model)
        self._call = ProbedCall(verifier.kind, verifier.model, rows, verifier.model_kwargs)
        self._stats = stats
        self._table = context_length(config)
        rope = length_dependent_rope(config)
        # The length at which rotary frequencies change; from there on they do so at every step if
        # they are dynamic, otherwise once ("longrope").
        originally = "original_max_position_embeddings"
        unscaled = rope.get(originally) or getattr(config, originally, None) or self._table
        self._unscaled = unscaled if rope else None
        self._is_dynamic = rope.get("rope_type") == "dynamic"
        self._is_probed = probed
        self._boundaries = boundaries(config)  # that no probe has crossed

    @property
    def may_pad(self) -> bool:
        """True if passes of packed rows may be padded: one token then runs as one of several, which
        must have been found exact. Each of several ranks has measured other costs."""
        is_exact = self._is_probed and self.refused is None
        return self.verifier.entries.packs and is_exact and self.ranks.alone

    def probe(self, length: int) -> bool:
        """True if drafts after texts of up to this length may be verified. Runs the probes that are
        due: the verifier's own, and one for each boundary that the texts have reached."""
        reached = [boundary for boundary in self._boundaries if boundary <= length]
        due = reached if self._is_probed else [None, *reached]
        for boundary in due if self.refused is None else ():
            finding = known_finding(self._call._replace(boundary=boundary), self._stats)
            if not finding.exact:
                self.refused = why_refused(finding, boundary)
                break
            self._is_probed = True
            if boundary is not None:
                self._boundaries.remove(boundary)
        return self.refused is None

    def watch(self, rows: Sequence[Row]) -> Callable[[], bool] | None:
        """A function that is true until code of others that these rows call, such as a criterion
        that switches an adapter, changes the model after the present pass. Drafts end then. `None`
        if they call none."""
        if not any(row.calls_others for row in rows):
            return None
        if self._watch is None:
            self._watch = Watch(self.verifier.model)
        watch = self._watch
        watch.mark()

        def is_same_model() -> bool:
            is_same = watch.is_unchanged()
            if not is_same:
                self.refused = CHANGED
                if self._stats is not None:
                    self._stats.explain(self.verifier.kind.name, CHANGED.text)
            return is_same

        return is_same_model

    def depth(self, index: int, length: int) -> int:
        """The greatest depth of a draft after the row with this index, whose text has this length;
        0 or less allows none.

        A draft ends at the first of

        - the next length that is not probed, or at which drafts are refused;
        - the end of the table of positions, unless the text is past it, as in plain decoding;
        - the length at which rotary frequencies change: one pass has one set of them, so that a
          longer draft would run accepted tokens with the wrong set.
        """
        deepest = sys.maxsize
        # Some models count positions, others tokens with their padding (Phi-3 drops its cache so).
        assert self.verifier.inputs is not None
        for last in (self.verifier.inputs.last_position(index, length), length - 1):
            if self._table is not None and last < self._table:
                deepest = min(deepest, self._table - 1 - last)
            if self._unscaled is not None and last <= self._unscaled:
                # The step at the border is plain: some models begin a new cache there (Phi-3).
                deepest = min(deepest, max(self._unscaled - 1 - last, 0))
            elif self._is_dynamic:
                deepest = min(deepest, 0)
        refused = self.refused is not None
        if refused and (self.refused is CHANGED or not self._is_probed):
            return 0
        ahead = [boundary for boundary in self._boundaries if refused or boundary > length]
        return min(deepest, ahead[0] - length) if ahead else deepest
