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

from ..drafting.calls import AwaitingKernels, begun
from ..drafting.drafter import checked_draft
from ..drafting.observation import Observation
from ..drafting.stats import SpeculationStats
from ..drafting.top_tokens import TopTokens, top_tokens
from ..drafting.tree import DraftTree
from ..verification.draft_limits import DraftLimits
from ..verification.prompt_states import prompt_top_tokens
from ..verification.ranks import Ranks
from ..verification.token_sequence import FixedTokens
from ..verification.verifier import Verifier
from .batch import BatchCriteria
from .budget import Budget
from .row import Row, accept, longest_row


@dataclass
class Loop:
    """The forward passes of one call, each over a draft for every row."""

    verifier: Verifier  # runs the target model
    budget: Budget  # how many nodes are drafted, and which are verified
    limits: DraftLimits  # how far drafts may go
    stats: SpeculationStats
    chains: bool  # whether drafts must not branch
    ranks: Ranks = field(default_factory=Ranks)  # run the target model; the first one drafts
    reads_prompts: bool = True  # whether drafters may learn what the target expects in prompts
    clock: Callable[[], float] = perf_counter
    offered: bool = False  # whether any draft had a node, verified or not
    # Inputs of the output layer in the prompts, see `Verifier.prompt_states`.
    _states: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.ranks.alone:  # others may have measured something else
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
                # Those that need no more tokens, now or when others have become longer, leave.
                ended = [row.finished and (pads or len(row) == row.max_length) for row in rows]
                kept = [i for i, has_ended in enumerate(ended) if not has_ended]
                if 0 < len(kept) < len(rows):
                    self.verifier.select(kept)
                rows = [rows[i] for i in kept]
            for row in rows:
                row.is_idle = row.finished and len(row) >= longest
            if all(row.is_idle for row in rows):
                return
            self.prepare(rows)
            self.step(rows)

    def prefill(self, rows: Sequence[Row]) -> None:
        """The first forward pass, over the prompts or what `read_ahead` has left of them. It yields
        a token for each row."""
        with self._timed("prefill_seconds"):
            fraction = self._record_prompts(rows)
            states = self._states
            for row in rows:
                row.draft = row.verified = DraftTree.empty()
            logits = self._forward(rows)  # (R, vocab_size)
            self.verifier.prompt_states, self._states = None, []
            top = self._accept(rows, logits)
            self.verifier.keep([row.path for row in rows])
            # After the first token, which does not wait for kernels that are loaded now.
            for row in rows:
                if not row.finished:
                    row.drafter = begun(row.drafter)
            if top is None:
                top = self._top_tokens(rows, logits)
            if self.ranks.agree(bool(states) and any(row.drafter.observed_top_k for row in rows)):
                self._observe_prompts(rows, states, logits, fraction)
            self._observe(rows, logits, top)

    def read_ahead(self, rows: Sequence[Row], length: int) -> None:
        """Runs the prompts up to this length, so that `prefill` runs the rest."""
        with self._timed("prefill_seconds"):
            self._record_prompts(rows)
            pieces = [FixedTokens(row.ids[:, :length]) for row in rows]
            self.verifier.forward(pieces, [DraftTree.empty()] * len(rows))
            self.verifier.keep([[]] * len(rows))

    def _record_prompts(self, rows: Sequence[Row]) -> float:
        """Lets the verifier record what drafters may learn from; returns what that may cost."""
        fraction = max(row.drafter.prompt_fraction for row in rows) if self.reads_prompts else 0
        fraction = self.ranks.agree(fraction)  # the output layer may be split over all ranks
        self.verifier.prompt_states = self._states if fraction > 0 else None
        return fraction

    def prepare(self, rows: Sequence[Row]) -> None:
        """Before a step, so that none of its clocks measures it: lets drafters begin that wait for
        kernels, and asks the model whether drafts are exact past a length that a row has come to.
        All ranks do so."""
        for row in rows:
            row.drafter = begun(row.drafter, row.output)
        waits = self.ranks.alone and all(isinstance(row.drafter, AwaitingKernels) for row in rows)
        if self.budget.most > 0 and not waits:
            self.limits.cross(max(len(row.seen) for row in rows if not row.is_idle))

    def step(self, rows: Sequence[Row]) -> None:
        """Verifies a draft for each row in one forward pass, and emits the accepted tokens and one
        more. Idle rows are left out."""
        with self._timed("drafting_seconds") as drafting_seconds:
            most = min(self.budget.nodes(rows), self.verifier.most_nodes)
            for i, row in enumerate(rows):
                row.draft = self._draft(i, row, most)
                self.offered = self.offered or len(row.draft) > 0
            paying = self.budget.trim(rows, drafting_seconds())
            for row, verified in zip(rows, self.ranks.agree(paying), strict=True):
                row.verified = verified
        with self._timed("verifying_seconds") as verifying_seconds:
            logits = self._forward(rows)  # (N, vocab_size)
            top = self._accept(rows, logits)
        with self._timed("other_seconds"):
            self.verifier.keep([row.path for row in rows])
            if self.verifier.in_step:
                self.budget.record(rows, self.verifier.pass_tokens, verifying_seconds())
        with self._timed("learning_seconds"):
            self._observe(rows, logits, top)

    def _draft(self, index: int, row: Row, nodes: int) -> DraftTree:
        if row.is_idle or not self.ranks.is_first:
            return DraftTree.empty()
        depth = self.limits.depth(len(row.seen), self.verifier.last_position(index, row.seen))
        if row.draft_end is not None:
            depth = min(depth, row.draft_end - len(row) - 1)  # one token is the target's own
        if nodes <= 0 or depth <= 0:
            return DraftTree.empty()
        call = row.drafter.call
        call.chain, call.prices = self.chains, self.budget.prices
        return checked_draft(row.drafter, nodes, self.verifier.vocab_size).truncated(depth)

    def _forward(self, rows: Sequence[Row]) -> torch.Tensor:
        """The logits `(N, vocab_size)` of a pass, from each row's `root` on those of its nodes."""
        # The last token of an idle row must not run: the model may have no position for it.
        seen = [FixedTokens(row.seen.ids[:, :-1]) if row.is_idle else row.seen for row in rows]
        logits, roots = self.verifier.forward(seen, [row.verified for row in rows])
        for row, root in zip(rows, roots, strict=True):
            row.root = root
        return logits

    def _accept(self, rows: Sequence[Row], logits: torch.Tensor) -> TopTokens | None:
        """Lets each row take what the target model chooses, the same tokens on all ranks. Returns
        the best next tokens at each node, if any drafter needs them."""
        top = self._top_tokens(rows, logits)
        paths = accept(rows, logits, None if top is None else top.choices[0])
        for row, path in zip(rows, paths, strict=True):
            row.path = path
        if not self.ranks.alone:
            own = [(row.path, row.emitted.tolist(), row.stopped_at) for row in rows]
            for row, mine, theirs in zip(rows, own, self.ranks.agree(own), strict=True):
                if mine != theirs:
                    row.path, tokens, stopped_at = theirs
                    row.replace(len(mine[1]), tokens, stopped_at)
        return top

    def _top_tokens(self, rows: Sequence[Row], logits: torch.Tensor) -> TopTokens | None:
        k = max(row.drafter.observed_top_k for row in rows)
        return top_tokens(logits[None], k) if k > 0 else None

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

    def _observe(self, rows: Sequence[Row], logits: torch.Tensor, top: TopTokens | None) -> None:
        """Shows the drafters what was verified, and counts it."""
        counts = []
        for row in rows:
            if row.path is not None:
                own = slice(row.root, row.root + 1 + len(row.verified))
                expected = () if top is None else (top.tokens[0, own], top.probs[0, own])
                seen = Observation(row.emitted, row.verified, logits[own], *expected)
                row.drafter.observe(seen)
                counts.append((len(row.verified), len(row.path)))
        self.stats.record_rows(counts)

    @contextmanager
    def _timed(self, name: str) -> Iterator[Callable[[], float]]:
        """Adds the seconds of its body to a field of the statistics. Yields a function that returns
        the seconds so far, or of the whole body once that is over."""
        began, ended = self.clock(), None
        yield lambda: (self.clock() if ended is None else ended) - began
        ended = self.clock()
        setattr(self.stats, name, getattr(self.stats, name) + ended - began)
