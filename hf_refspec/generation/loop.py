"""The decoding loop. A step drafts a tree for each row, verifies all trees in one forward pass of
the target model, and emits the tokens that the target has chosen: the accepted nodes and one more.

    plan    sizes: the nodes and the depth of each row's draft             plan.py
    draft   a tree for each row, by its drafter                            plan.py, drafting/
    trim    the nodes that pay, none where the model turns out not to      plan.py, budget.py
            verify them exactly; and whether padding pays
    forward the logits after each row and each node                        verification/verifier.py
    accept  tokens by the target's own logits, processors, criteria and    accept.py, row.py
            random numbers, in the order of plain decoding
    keep    the accepted nodes in the cache, nothing else                  verification/
    learn   costs, and what the drafters learn of the pass                 below

A draft only decides how many tokens a pass yields. Several rows are the general case, and one row
is R = 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

from ..drafting.contract import Observation
from ..drafting.stats import DraftStats
from ..drafting.tree import DraftTree
from ..verification.passes import FixedTokens, PassResult
from ..verification.verifier import Verifier
from .accept import Accepted, accept
from .budget import Budget
from .plan import DraftLimits, Drafts, Plan, draft, plan_step
from .request import BatchCriteria
from .row import Row, longest_row


@dataclass
class Loop:
    """The forward passes of one call, each over a draft for every row."""

    verifier: Verifier  # runs the target model
    budget: Budget  # the number of nodes that are drafted, and the ones that are verified
    limits: DraftLimits  # the depth of drafts, and their form
    stats: DraftStats
    offered: bool = False  # true if any draft had a node, verified or not

    def step(self, rows: Sequence[Row], longest: int = 0) -> Accepted:
        """Verifies a draft for each row in one forward pass; see [`plan_step`] for `longest`."""
        plan = plan_step(rows, self.budget, self.limits, longest)
        drafts = draft(rows, plan)
        drafts = plan.trim(drafts)
        texts = [row.seen for row in rows]
        result = self.verifier.forward(texts, drafts.trees, drafts.least_tokens)
        taken = accept(rows, drafts.trees, result, self.limits)
        self.verifier.keep([row.path for row in taken.rows])
        self.learn(plan, drafts, result, taken)
        return taken

    def learn(self, plan: Plan, drafts: Drafts, result: PassResult, taken: Accepted) -> None:
        """Teaches the budget the cost of a pass, and the drafters the target's expectations."""
        began = perf_counter()
        self.offered = self.offered or any(drafts.offered)
        if plan.auto is not None and result.is_step:
            for row, tree, of_row in zip(plan.rows, drafts.offered, taken.rows, strict=True):
                if tree:
                    row.drafter.calibration.record(tree, of_row.tokens)
            plan.auto.record(
                plan.shape,
                result.pass_tokens,
                taken.seconds,
                sum(len(of_row.tokens) for of_row in taken.rows),
                asked=plan.nodes > 0,
                verified=any(drafts.trees),
            )
        self._observe(plan.rows, drafts.trees, result, taken)
        self.stats.add(
            drafting_seconds=drafts.seconds,
            verifying_seconds=taken.seconds,
            other_seconds=began - result.began - taken.seconds,
            learning_seconds=perf_counter() - began,
        )

    def run(
        self, rows: list[Row], pads: bool, keeps_cache: bool, criteria: BatchCriteria | None = None
    ) -> None:
        """Decodes until all rows have ended.

        A row that has ended is padded (`pads`), or decoded until it is as long as the longest. It
        stays in the cache if the call `keeps_cache`. The `criteria` are asked once for all rows.
        """
        all_rows = rows
        self.prefill(rows)
        while True:
            if criteria is not None:
                criteria.ask(all_rows)
            longest = 0 if pads else longest_row(all_rows)
            if not keeps_cache:
                # A row that needs no more tokens, now or when others have become longer, leaves.
                ended = [
                    row.stopped_at is not None and (pads or len(row) == row.max_length)
                    for row in rows
                ]
                kept = [i for i, has_ended in enumerate(ended) if not has_ended]
                if 0 < len(kept) < len(rows):
                    self.verifier.select(kept)
                rows = [rows[i] for i in kept]
            if all(row.stopped_at is not None and len(row) >= longest for row in rows):
                return
            self.step(rows, longest)

    def prefill(self, rows: Sequence[Row]) -> None:
        """The first forward pass, over what `read_ahead` has not run of the prompts: it yields one
        token for each row."""
        began = perf_counter()
        trees: list[DraftTree | None] = [DraftTree.empty()] * len(rows)
        result = self.verifier.forward([row.seen for row in rows], trees)
        taken = accept(rows, trees, result, self.limits)
        self.verifier.keep([row.path for row in taken.rows])
        self._observe(rows, trees, result, taken)
        self.stats.add(prefill_seconds=perf_counter() - began)

    def read_ahead(self, rows: Sequence[Row], length: int) -> None:
        """Runs the prompts up to this length; `prefill` runs the rest."""
        began = perf_counter()
        pieces = [FixedTokens(row.ids[:, :length]) for row in rows]
        self.verifier.forward(pieces)
        self.verifier.keep([[]] * len(rows))
        self.stats.add(prefill_seconds=perf_counter() - began)

    def _observe(
        self,
        rows: Sequence[Row],
        drafts: Sequence[DraftTree | None],
        result: PassResult,
        taken: Accepted,
    ) -> None:
        """Shows the drafters what was verified, and counts it."""
        top = taken.top
        counts = []
        for row, tree, root, of_row in zip(rows, drafts, result.roots, taken.rows, strict=True):
            if tree is not None and of_row.path is not None:
                places = slice(root, root + 1 + len(tree))
                states = None
                if result.hidden_states is not None:
                    states = self.verifier.states(row.seen, result, tree, of_row.path)
                observation = Observation(
                    of_row.tokens,
                    tree,
                    result.logits[places],
                    top_tokens=None if top is None else top.tokens[0, places],
                    top_probs=None if top is None else top.probs[0, places],
                    states=states,
                )
                row.drafter.observe(observation)
                counts.append((of_row.verified, len(of_row.path)))
        self.stats.record_rows(counts)
