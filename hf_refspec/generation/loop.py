"""The decoding loop: draft, trim, forward, accept, keep, observe.

Each token is chosen from the target model's own logits with the call's own logits processors,
stopping criteria and random numbers, in the order of plain decoding; a draft only decides how many
tokens one forward pass yields. Several rows are the general case, and one row is R = 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter

import torch

from ..drafting.drafter import checked_draft
from ..drafting.observation import Observation
from ..drafting.stats import DraftStats
from ..drafting.top_tokens import TopTokens, top_tokens
from ..drafting.tree import DraftTree
from ..verification.cache import FixedTokens
from ..verification.draft_limits import DraftLimits
from ..verification.prompt_states import prompt_top_tokens
from ..verification.ranks import Ranks
from ..verification.verifier import Verifier
from .batch import BatchCriteria
from .budget import Budget
from .row import Row, longest_row
from .step import Step, accept


@dataclass
class Loop:
    """The forward passes of one call, each over a draft for every row."""

    verifier: Verifier  # runs the target model
    budget: Budget  # how many nodes are drafted, and which are verified
    limits: DraftLimits  # how far drafts may go
    stats: DraftStats
    chains: bool  # whether drafts must not branch
    reads_prompts: bool = True  # whether drafters may learn what the target expects in prompts
    clock: Callable[[], float] = perf_counter
    offered: bool = False  # whether any draft had a node, verified or not
    # Inputs of the output layer in the prompts, see `Verifier.prompt_states`.
    _states: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.verifier.padded_size = self.budget.padded_size

    def run(
        self, rows: list[Row], pads: bool, keeps_cache: bool, criteria: BatchCriteria | None = None
    ) -> None:
        """Decodes until all rows have ended.

        A row that has ended is padded (`pads`), or goes on until it is as long as the longest. It
        stays in the cache if that `keeps_cache`. `criteria` are those that no row asks of itself.
        """
        all_rows = rows
        self.prefill(rows)
        while True:
            if criteria is not None:
                criteria.ask(all_rows)
            longest = 0 if pads else longest_row(all_rows)
            if not keeps_cache:
                # A row that needs no more tokens, now or when others have become longer, leaves.
                ended = [row.finished and (pads or len(row) == row.max_length) for row in rows]
                kept = [i for i, has_ended in enumerate(ended) if not has_ended]
                if 0 < len(kept) < len(rows):
                    self.verifier.select(kept)
                rows = [rows[i] for i in kept]
            steps = [Step(row, is_idle=row.finished and len(row) >= longest) for row in rows]
            if all(step.is_idle for step in steps):
                return
            self.step(steps)

    def prefill(self, rows: Sequence[Row]) -> None:
        """The first forward pass, over the prompts or what `read_ahead` has left of them. It yields
        a token for each row."""
        with self._timed("prefill_seconds"):
            fraction = self._record_prompts(rows)
            states, steps = self._states, [Step(row) for row in rows]
            logits = self._forward(steps)  # (R, vocab_size)
            self.verifier.prompt_states, self._states = None, []
            top = self._accept(steps, logits)
            self.verifier.keep([step.path for step in steps])
            if states:
                self._observe_prompts(rows, states, logits, fraction)
            self._observe(steps, logits, top)

    def read_ahead(self, rows: Sequence[Row], length: int) -> None:
        """Runs the prompts up to this length, so that `prefill` runs the rest."""
        with self._timed("prefill_seconds"):
            self._record_prompts(rows)
            pieces = [FixedTokens(row.ids[:, :length]) for row in rows]
            self.verifier.forward(pieces, [DraftTree.empty()] * len(rows))
            self.verifier.keep([[]] * len(rows))

    def _record_prompts(self, rows: Sequence[Row]) -> float:
        """Lets the verifier record what drafters may learn from; returns what that may cost."""
        fraction = self._prompt_fraction(rows) if self.reads_prompts else 0.0
        self.verifier.prompt_states = self._states if fraction > 0 else None
        return fraction

    def _prompt_fraction(self, rows: Sequence[Row]) -> float:
        drafters = [row.drafter for row in rows]
        return max(each.prompt_fraction if each.observed_top_k else 0.0 for each in drafters)

    def step(self, steps: Sequence[Step]) -> None:
        """Verifies a draft for each row in one forward pass, and emits the accepted tokens and one
        more. Idle rows are left out."""
        if self.budget.most > 0:  # outside of all clocks: it may probe the model
            self.limits.cross(max(len(step.row.seen) for step in steps if not step.is_idle))
        with self._timed("drafting_seconds") as drafting_seconds:
            self._draft(steps)
            self._choose_nodes(steps, drafting_seconds())
        with self._timed("verifying_seconds") as verifying_seconds:
            logits = self._forward(steps)  # (N, vocab_size)
            top = self._accept(steps, logits)
        with self._timed("other_seconds"):
            self.verifier.keep([step.path for step in steps])
            if self.verifier.in_step:
                self.budget.record(steps, self.verifier.pass_tokens, verifying_seconds())
        with self._timed("learning_seconds"):
            self._observe(steps, logits, top)

    def _draft(self, steps: Sequence[Step]) -> None:
        most = min(self.budget.nodes(steps), self.verifier.most_nodes)
        for i, step in enumerate(steps):
            row = step.row
            if most <= 0 or step.is_idle:
                continue
            depth = self.limits.depth(len(row.seen), self.verifier.last_position(i, row.seen))
            if row.draft_end is not None:
                depth = min(depth, row.draft_end - len(row) - 1)  # one token is the target's own
            if depth > 0:
                call = row.drafter.call
                vocab_size = self.verifier.vocab_size
                call.chain, call.speed = self.chains, self.budget.speed
                call.noise = row.noise_ahead(vocab_size) if row.do_sample else None
                drafted = checked_draft(row.drafter, most, vocab_size)
                step.draft = drafted.truncated(depth)
        self.offered = self.offered or any(len(step.draft) for step in steps)

    def _choose_nodes(self, steps: Sequence[Step], drafting_seconds: float) -> None:
        for step, verified in zip(steps, self.budget.trim(steps, drafting_seconds), strict=True):
            step.verified = verified

    def _forward(self, steps: Sequence[Step]) -> torch.Tensor:
        """The logits `(N, vocab_size)` of a pass, from each step's `root` on those of its nodes."""
        # The last token of an idle row must not run: the model may have no position for it.
        seen = [
            FixedTokens(step.row.seen.ids[:, :-1]) if step.is_idle else step.row.seen
            for step in steps
        ]
        logits, roots = self.verifier.forward(seen, [step.verified for step in steps])
        for step, root in zip(steps, roots, strict=True):
            step.root = root
        return logits

    def _accept(self, steps: Sequence[Step], logits: torch.Tensor) -> TopTokens | None:
        """Lets each row take what the target model chooses. Returns the best next tokens at each
        node, if any drafter needs them."""
        k = max(step.row.drafter.observed_top_k for step in steps)
        top = top_tokens(logits[None], k) if k > 0 else None
        accept(steps, logits, None if top is None else top.choices[0])
        return top

    def _observe_prompts(
        self, rows: Sequence[Row], states: list[torch.Tensor], logits: torch.Tensor, fraction: float
    ) -> None:
        """Shows the drafters what the target expects inside the prompts; by now each row is one
        token longer."""
        k = max(row.drafter.observed_top_k for row in rows)
        prompts = self.verifier.prompts
        last = logits[[prompts.index(prompt) for prompt in range(max(prompts) + 1)], None]
        # All prompts together cost no more than one would: drafts of several rows pay less.
        top = prompt_top_tokens(self.verifier.model, states, last, k, fraction / len(last))
        if top is None:
            return
        for i, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
            length = self.verifier.last_position(i, row.seen)  # of the prompt without padding
            prompt_ids = row.seen.tail(1 + min(length, len(row.seen) - 1))[:-1]
            count = min(top.tokens.shape[1], len(prompt_ids) - 1)
            if count > 0 and row.drafter.prompt_fraction > 0:
                expected = top.tokens[prompt, -count:], top.probs[prompt, -count:]
                none = DraftTree.empty()
                row.drafter.observe(Observation(prompt_ids, none, None, *expected, of_prompt=True))

    def _observe(self, steps: Sequence[Step], logits: torch.Tensor, top: TopTokens | None) -> None:
        """Shows the drafters what was verified, and counts it."""
        counts = []
        for step in steps:
            if step.path is not None:
                own = slice(step.root, step.root + 1 + len(step.verified))
                expected = () if top is None else (top.tokens[0, own], top.probs[0, own])
                seen = Observation(step.emitted, step.verified, logits[own], *expected)
                step.row.drafter.observe(seen)
                counts.append((len(step.verified), len(step.path)))
        self.stats.record_rows(counts)

    @contextmanager
    def _timed(self, name: str) -> Iterator[Callable[[], float]]:
        """Adds the seconds of its body to a field of the statistics. Yields a function that returns
        the seconds so far, or of the whole body once that is over."""
        began, ended = self.clock(), None
        yield lambda: (self.clock() if ended is None else ended) - began
        ended = self.clock()
        setattr(self.stats, name, getattr(self.stats, name) + ended - began)


@dataclass
class RankedLoop(Loop):
    """Decodes the same text in all `ranks`: the drafts and the tokens of the first one count."""

    ranks: Ranks = field(default_factory=Ranks)

    def __post_init__(self) -> None:
        """Passes are not padded: each rank has measured other costs."""

    def _prompt_fraction(self, rows: Sequence[Row]) -> float:
        return self.ranks.agree(super()._prompt_fraction(rows))  # the output layer may be split

    def _draft(self, steps: Sequence[Step]) -> None:
        if self.ranks.is_first:
            super()._draft(steps)

    def _choose_nodes(self, steps: Sequence[Step], drafting_seconds: float) -> None:
        super()._choose_nodes(steps, drafting_seconds)
        chosen = self.ranks.agree([step.verified for step in steps])
        for step, verified in zip(steps, chosen, strict=True):
            step.verified = verified

    def _accept(self, steps: Sequence[Step], logits: torch.Tensor) -> TopTokens | None:
        top = super()._accept(steps, logits)
        own = [(step.path, step.emitted.tolist(), step.row.stopped_at) for step in steps]
        for step, mine, first in zip(steps, own, self.ranks.agree(own), strict=True):
            if mine != first:
                step.path, tokens, stopped_at = first
                step.row.replace(len(mine[1]), tokens, stopped_at)
        return top
