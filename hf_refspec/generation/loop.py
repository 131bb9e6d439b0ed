"""The decoding loop: draft, trim, forward, accept, keep, observe.

Each token is chosen from the target model's own logits with the call's own logits processors,
stopping criteria and random numbers, in the order of plain decoding; a draft only decides how many
tokens one forward pass yields. Several rows are the general case, and one row is R = 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np
import torch

from ..drafting.drafter import Drafter, checked_draft
from ..drafting.observation import Observation
from ..drafting.stats import SpeculationStats
from ..drafting.top_tokens import TopTokens, top_tokens
from ..drafting.tree import DraftTree
from ..verification.ranks import Ranks
from ..verification.reach import Reach
from ..verification.verifier import StandingTokens, Verifier
from .acceptance import accept
from .budget import Budget
from .criteria import BatchCriteria, longest_row
from .prompt_logits import prompt_top_tokens
from .row import Row


@dataclass
class Loop:
    """The forward passes of one call, each over a draft for every row.

    Attributes:
        verifier ([`Verifier`]): Runs the target model.
        budget ([`Budget`]): Says how many nodes are drafted, and which are verified.
        reach ([`Reach`]): Says how far drafts may reach.
        stats ([`SpeculationStats`]): Of the call.
        chains (`bool`): Whether drafts must not branch.
        ranks ([`Ranks`]): The processes that run the target model; the first one drafts.
        reads_prompts (`bool`): Whether drafters may be told what the target expects inside prompts.
        clock (callable): The time in seconds.
    """

    verifier: Verifier
    budget: Budget
    reach: Reach
    stats: SpeculationStats
    chains: bool
    ranks: Ranks = field(default_factory=Ranks)
    reads_prompts: bool = True
    clock: Callable[[], float] = perf_counter

    def run(
        self,
        rows: list[Row],
        drafters: list[Drafter],
        criteria: BatchCriteria,
        pads: bool,
        keeps_cache: bool,
    ) -> None:
        """Decodes until all rows have ended.

        Args:
            rows (`list[Row]`): R rows.
            drafters (`list[Drafter]`): One for each.
            criteria ([`BatchCriteria`]): Those that no row asks of itself.
            pads (`bool`): Whether a row that has ended is padded. If not, it goes on until it is as
                long as the longest.
            keeps_cache (`bool`): Whether rows that have ended must stay in the cache.
        """
        all_rows = rows
        self.prefill(rows, drafters)
        while True:
            criteria.ask(all_rows)
            longest = 0 if pads else longest_row(all_rows)
            if not keeps_cache:
                kept = [i for i, row in enumerate(rows) if _may_go_on(row, pads)]
                if 0 < len(kept) < len(rows):
                    self.verifier.select(kept)
                rows, drafters = [rows[i] for i in kept], [drafters[i] for i in kept]
            going = [not row.finished or len(row) < longest for row in rows]
            if not any(going):
                return
            self.step(rows, drafters, going)

    def prefill(self, rows: Sequence[Row], drafters: Sequence[Drafter]) -> None:
        """The first forward pass, over the prompts. It yields a token for each row."""
        began, none = self.clock(), [DraftTree.empty()] * len(rows)
        fraction = max(drafter.prompt_fraction for drafter in drafters) if self.reads_prompts else 0
        fraction = self.ranks.agree(fraction)  # the output layer may be one of all ranks
        states: list[torch.Tensor] = []
        self.verifier.prompt_states = states if fraction > 0 else None
        logits = self.verifier.forward([row.seen for row in rows], none)  # (R, 1, vocab_size)
        self.verifier.prompt_states = None
        top = _top_tokens(drafters, logits)
        paths = _accepted(rows, logits, none, [True] * len(rows), top)
        paths = _agreed(self.ranks, rows, paths)
        self.verifier.keep(paths)
        if states:
            self._observe_prompts(drafters, rows, states, logits, fraction)
        self._observe(drafters, none, paths, [row.tail(1) for row in rows], logits, top)
        self.stats.prefill_seconds += self.clock() - began

    def step(self, rows: Sequence[Row], drafters: Sequence[Drafter], going: Sequence[bool]) -> None:
        """A forward pass over a draft for each row. It yields the accepted draft tokens and one
        more.

        Args:
            rows (sequence of [`Row`]): R rows.
            drafters (sequence of [`Drafter`]): One for each.
            going (sequence of `bool`): Which rows go on; the others stand still.
        """
        began = self.clock()
        drafts = [self._draft(i, rows[i], drafters[i], each) for i, each in enumerate(going)]
        paying = self.budget.trim(drafters, drafts, self.clock() - began)
        trimmed = self.ranks.agree(paying)
        drafted = self.clock()
        seen = [
            row.seen if each else StandingTokens(row.seen)
            for row, each in zip(rows, going, strict=True)
        ]
        logits = self.verifier.forward(seen, trimmed)  # (R, 1 + T, vocab_size)
        top = _top_tokens(drafters, logits)
        paths = _agreed(self.ranks, rows, _accepted(rows, logits, trimmed, going, top))
        verified = self.clock()
        self.verifier.keep(paths)
        new_tokens = [
            None if path is None else row.tail(len(path) + 1)
            for row, path in zip(rows, paths, strict=True)
        ]
        if self.verifier.in_step:
            pass_tokens = self.verifier.pass_tokens
            self.budget.record(drafters, drafts, new_tokens, pass_tokens, verified - drafted)
        kept = self.clock()
        self._observe(drafters, trimmed, paths, new_tokens, logits, top)
        self.stats.drafting_seconds += drafted - began
        self.stats.verifying_seconds += verified - drafted
        self.stats.learning_seconds += self.clock() - kept
        self.stats.other_seconds += kept - verified

    def _draft(self, index: int, row: Row, drafter: Drafter, goes_on: bool) -> DraftTree:
        most = min(self.budget.most, self.verifier.most_nodes)
        if most == 0 or not goes_on or self.verifier.replaced_cache:
            return DraftTree.empty()
        position = self.verifier.last_position(index, row.seen)
        deepest = self.reach.depth(len(row.seen), position)
        if row.draft_end is not None:
            deepest = min(deepest, row.draft_end - len(row) - 1)  # one token is the target's own
        # Only now: the reach may have run a probe, which all ranks run.
        nodes = min(self.budget.nodes, most) if self.ranks.is_first else 0
        if nodes == 0 or deepest <= 0:
            return DraftTree.empty()
        draft = checked_draft(drafter, nodes, self.verifier.vocab_size, self.chains)
        return draft.truncated(deepest)

    def _observe_prompts(
        self,
        drafters: Sequence[Drafter],
        rows: Sequence[Row],
        states: list[torch.Tensor],
        logits: torch.Tensor,
        fraction: float,
    ) -> None:
        """Tells the drafters what the target expects inside the prompts, which are one token
        longer by now."""
        k = max(drafter.observed_top_k for drafter in drafters)
        top = prompt_top_tokens(self.verifier.model, states, logits, k, fraction)
        if top is None:
            return
        for i, (drafter, row) in enumerate(zip(drafters, rows, strict=True)):
            length = self.verifier.last_position(i, row.seen)  # of the prompt without padding
            prompt_ids = row.seen.tail(1 + min(length, len(row.seen) - 1))[:-1]
            count = min(top.tokens.shape[1], len(prompt_ids) - 1)
            if count > 0 and drafter.prompt_fraction > 0:
                expected = top.tokens[i, -count:], top.probs[i, -count:]
                none = DraftTree.empty()
                drafter.observe(Observation(prompt_ids, none, None, *expected, of_prompt=True))

    def _observe(
        self,
        drafters: Sequence[Drafter],
        drafts: Sequence[DraftTree],
        paths: Sequence[list[int] | None],
        new_tokens: Sequence[np.ndarray | None],
        logits: torch.Tensor,
        top: TopTokens | None,
    ) -> None:
        """Tells the drafters what was verified, and counts it."""
        counts = []
        for i, (drafter, draft) in enumerate(zip(drafters, drafts, strict=True)):
            path, tokens = paths[i], new_tokens[i]
            if path is not None and tokens is not None:
                nodes = 1 + len(draft)
                expected = () if top is None else (top.tokens[i, :nodes], top.probs[i, :nodes])
                drafter.observe(Observation(tokens, draft, logits[i, :nodes], *expected))
                counts.append((len(draft), len(path)))
        self.stats.record_rows(counts)


def _top_tokens(drafters: Sequence[Drafter], logits: torch.Tensor) -> TopTokens | None:
    """What drafters want to know of the logits, if any of them wants to."""
    k = max(drafter.observed_top_k for drafter in drafters)
    return top_tokens(logits, k) if k > 0 else None


def _accepted(
    rows: Sequence[Row],
    logits: torch.Tensor,
    drafts: Sequence[DraftTree],
    going: Sequence[bool],
    top: TopTokens | None,
) -> list[list[int] | None]:
    """The accepted nodes of each row, `None` for those that stand still."""
    choices = None if top is None else top.choices
    if all(going):
        return list(accept(rows, logits, drafts, choices))
    moving = [i for i, goes_on in enumerate(going) if goes_on]
    paths = iter(
        accept(
            [rows[i] for i in moving],
            logits[moving],
            [drafts[i] for i in moving],
            None if choices is None else choices[moving],
        )
    )
    return [next(paths) if goes_on else None for goes_on in going]


def _agreed(
    ranks: Ranks, rows: Sequence[Row], paths: list[list[int] | None]
) -> list[list[int] | None]:
    """The first rank's paths; the rows take its tokens, and end where its rows do."""
    if ranks.alone:
        return paths
    own = [
        None if path is None else (path, row.tail(len(path) + 1).tolist(), row.stopped_at)
        for row, path in zip(rows, paths, strict=True)
    ]
    agreed = ranks.agree(own)
    for row, mine, theirs in zip(rows, own, agreed, strict=True):
        if mine is not None and theirs is not None and mine != theirs:
            row.replace(len(mine[1]), theirs[1], theirs[2])
    return [None if each is None else each[0] for each in agreed]


def _may_go_on(row: Row, pads: bool) -> bool:
    """Whether a row may need more tokens, now or when others have become longer."""
    return not row.finished or not (pads or len(row) == row.max_length)
