"""The sizes of a step: how many nodes each row drafts and how deep, which of them are verified, and
how many tokens the pass has.

[`plan_step`] sets the number of nodes and their depth before anything is drafted, [`Plan.trim`]
keeps the drafted nodes that pay and may pad their pass. Both ask the call's budget, see
`budget.py`, and its [`DraftLimits`]. A static cache pads each pass to one of a few widths, the
narrowest that its drafts fit into, see `slots.py`.

Until a probe allows it, no draft crosses a length at which attention may become another computation
(a window, a chunk). The probe runs when a text that has reached this length has a draft to verify.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress
from time import perf_counter

from ..drafting.contract import Call, checked_draft
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
from ..verification.probe import ProbedCall, finding_about
from ..verification.ranks import Ranks
from ..verification.verifier import REPRODUCIBLE, Verifier
from .budget import AutoBudget, BatchShape, Budget
from .row import Row


@dataclass(frozen=True)
class Drafts:
    """The drafts of a step.

    Attributes:
        offered (`list[DraftTree | None]`): What the drafters have drafted; `None` for a row that
            takes no part in the pass.
        trees (`list[DraftTree | None]`): The part of it that the pass verifies.
        seconds (`float`): The time that drafting has taken.
        least_tokens (`int`): The tokens to which the pass is padded, if it has fewer.
    """

    offered: list[DraftTree | None]
    trees: list[DraftTree | None]
    seconds: float
    least_tokens: int = 0


@dataclass(frozen=True)
class Plan:
    """The sizes of one step.

    Attributes:
        nodes (`int`): The most nodes that each row drafts; 0 for a plain step, and for all
            ranks but the first.
        depths (`list[int | None]`): The greatest depth of each row's draft, 0 for none; `None` for
            a row that takes no part in the pass.
        auto ([`AutoBudget`], *optional*): Chooses the nodes that pay; `None` where the user fixed
            their number.
    """

    rows: Sequence[Row]
    limits: DraftLimits
    shape: BatchShape
    nodes: int
    depths: list[int | None]
    auto: AutoBudget | None

    def trim(self, drafts: Drafts) -> Drafts:
        """Keeps the nodes that pay, and says how many tokens their pass has; the first of several
        ranks decides. All trees are empty if a probe shows that the model does not verify drafts
        exactly: one runs where no finding is known yet, and at each length at which attention
        changes, see [`Exactness.probe`]."""
        began = perf_counter()
        limits = self.limits
        exactness = limits.exactness
        auto = self.auto
        trees = drafts.trees
        if auto is not None and self.nodes > 0:
            trees = auto.trim(self.rows, trees, self.shape, drafts.seconds)
        seconds = drafts.seconds + perf_counter() - began
        if not limits.ranks.alone:
            trees = limits.ranks.agree(trees)
        if any(trees) and not exactness.probe(self.shape.length):
            trees = [None if tree is None else DraftTree.empty() for tree in trees]
        least_tokens = 0
        may_pad = limits.verifier.entries.packs and limits.ranks.alone  # ranks measure other costs
        # In a padded pass one token runs as one of several, which must have been found exact.
        if auto is not None and may_pad and exactness.covers(self.shape.length):
            passes = zip(self.rows, trees, limits.verifier.cached, strict=True)
            sizes = [len(row.seen) - n + len(tree) for row, tree, n in passes if tree is not None]
            least_tokens = auto.costs.cheapest(sum(sizes))
        return replace(drafts, trees=trees, seconds=seconds, least_tokens=least_tokens)


def plan_step(rows: Sequence[Row], budget: Budget, limits: DraftLimits, longest: int = 0) -> Plan:
    """Decides how many nodes each row drafts, and how deep.

    The number of nodes is the least of what the `budget` allows (`max_draft_tokens`; where that is
    "auto", none while drafts do not pay) and of what the cache has room for. The depth ends at the
    `limits` of the call and at the end of each row.

    A row that has ended takes no part, unless the call does not pad and the row is still shorter
    than `longest`."""
    takes_part = [row.stopped_at is None or len(row) < longest for row in rows]
    length = max(len(row.seen) for row in compress(rows, takes_part))
    shape = BatchShape(len(rows), sum(takes_part), length)
    auto: AutoBudget | None = None
    if isinstance(budget, AutoBudget):
        auto, nodes = budget, budget.nodes(shape)
    else:
        nodes = budget
    room = limits.verifier.entries.room(limits.verifier.cached)
    nodes = min(nodes, room) if limits.ranks.is_first else 0  # it drafts for the others
    depths: list[int | None] = []
    for i, row in enumerate(rows):
        depth = limits.depth(i, len(row.seen)) if takes_part[i] and nodes > 0 else 0
        if row.draft_end is not None:
            depth = min(depth, row.draft_end - len(row) - 1)  # one token is the target's own
        depths.append(max(depth, 0) if takes_part[i] else None)
    return Plan(rows, limits, shape, nodes, depths, auto)


def draft(rows: Sequence[Row], plan: Plan) -> Drafts:
    """The draft tree of each row, as large and deep as planned."""
    began = perf_counter()
    vocab_size = plan.limits.vocab_size
    speed = None if plan.auto is None else partial(plan.auto.speed, plan.shape)
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


class Exactness:
    """What a call knows of whether drafts are verified exactly, by its probes, and as long as its
    model is not changed.

    Attributes:
        is_probed (`bool`): True if a probe has found the verifier exact, or none is needed: else
            one runs before the first draft.
        unprobed (`list[int]`): The lengths, ascending, at which attention may become another
            computation and which no probe has crossed.
        refused ([`Reason`], *optional*): Why there are no more drafts, if so.
    """

    def __init__(
        self, verifier: Verifier, rows: int, is_probed: bool, stats: DraftStats | None
    ) -> None:
        """`rows` is their number; `stats` count the passes of probes."""
        self.is_probed = is_probed
        self.unprobed = boundaries(text_config(verifier.model))
        self.refused: Reason | None = None
        self._verifier = verifier
        kwargs = verifier.model_kwargs
        config = verifier.generation_config if verifier.kind is REPRODUCIBLE else None
        self._call = ProbedCall(verifier.kind, verifier.model, rows, kwargs, config=config)
        self._stats = stats
        self._watch: Watch | None = None

    def covers(self, length: int) -> bool:
        """True if probes have shown that drafts after texts of up to this length are exact."""
        crossed = all(boundary > length for boundary in self.unprobed)
        return self.is_probed and self.refused is None and crossed

    def probe(self, length: int) -> bool:
        """True if drafts after texts of up to this length may be verified. Runs the probes that are
        due: the verifier's own, and one for each of the `unprobed` lengths that texts have reached.
        """
        reached = [boundary for boundary in self.unprobed if boundary <= length]
        due = reached if self.is_probed else [None, *reached]
        for boundary in due if self.refused is None else ():
            finding = finding_about(self._call._replace(boundary=boundary), self._stats)
            if not finding.exact:
                self.refused = why_refused(finding, boundary)
                break
            self.is_probed = True
            if boundary is not None:
                self.unprobed.remove(boundary)
        return self.refused is None

    def watch(self) -> Callable[[], bool]:
        """A function that is true until code of others, such as a criterion that switches an
        adapter, changes the model after the present pass. Drafts end then."""
        if self._watch is None:
            self._watch = Watch(self._verifier.model)
        watch = self._watch
        watch.mark()

        def is_same_model() -> bool:
            is_same = watch.is_unchanged()
            if not is_same:
                self.refused = CHANGED
                if self._stats is not None:
                    self._stats.explain(self._verifier.kind.name, CHANGED.text)
            return is_same

        return is_same_model


class DraftLimits:
    """Limits of the drafts of a call: their depth, their ids, and whether they may branch.

    Attributes:
        verifier ([`Verifier`]): Runs the passes.
        exactness ([`Exactness`]): Whether, and up to which length, it is exact.
        chains (`bool`): True if drafts must not branch.
        vocab_size (`int`): The number of ids that a draft may have.
        ranks ([`Ranks`]): The processes that decode one text together; the first one decides.
    """

    def __init__(
        self,
        verifier: Verifier,
        stats: DraftStats | None = None,
        rows: int = 1,
        chains: bool = False,
        is_probed: bool = True,
        ranks: Ranks | None = None,
    ) -> None:
        """See [`Exactness`] for `stats`, `rows` and `is_probed`."""
        self.verifier = verifier
        self.exactness = Exactness(verifier, rows, is_probed, stats)
        self.chains = chains or not verifier.kind.takes_trees
        self.vocab_size = vocab_size_of(verifier.model)
        self.ranks = Ranks() if ranks is None else ranks
        config = text_config(verifier.model)
        self._table = context_length(config)
        rope = length_dependent_rope(config)
        # The length at which rotary frequencies change; from there on they do so at every step if
        # they are dynamic, otherwise once ("longrope").
        originally = "original_max_position_embeddings"
        unscaled = rope.get(originally) or getattr(config, originally, None) or self._table
        self._unscaled = unscaled if rope else None
        self._is_dynamic = rope.get("rope_type") == "dynamic"

    def depth(self, index: int, length: int) -> int:
        """The greatest depth of a draft after the row with this index, whose text has this length;
        0 or less allows none.

        A draft ends at the first of

        - the text itself, where drafts are refused, and the next length that is not probed;
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
        if self.exactness.refused is not None:
            return 0
        ahead = [boundary for boundary in self.exactness.unprobed if boundary > length]
        return min(deepest, ahead[0] - length) if ahead else deepest
