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
from typing import TypeVar

import torch

from ..drafting.contract import Call, Drafter, Observation, checked_draft
from ..drafting.stats import DraftStats
from ..drafting.top_tokens import TopTokens, top_tokens
from ..drafting.tree import DraftTree
from ..kernels.compilation import drafting_kernels
from ..text_config import text_config
from ..verification.draft_limits import DraftLimits
from ..verification.passes import AllButLast, FixedTokens, PassResult
from ..verification.prompt_logits import prompt_top_tokens
from ..verification.ranks import Ranks
from ..verification.verifier import Verifier
from .batch import BatchCriteria
from .budget import Budget, make_budget
from .row import Row, longest_row
from .step import Step, accept

_Value = TypeVar("_Value")


@dataclass
class Loop:
    """The forward passes of one call, each over a draft for every row."""

    verifier: Verifier  # runs the target model
    budget: Budget  # how many nodes are drafted, and which are verified
    limits: DraftLimits  # how far drafts may go
    stats: DraftStats
    vocab_size: int
    chains: bool  # whether drafts must not branch
    reads_prompts: bool = True  # whether drafters may learn what the target expects in prompts
    # The processes that decode one text together, if several do: the first one decides on drafts
    # and tokens.
    ranks: Ranks | None = None
    clock: Callable[[], float] = perf_counter
    offered: bool = False  # whether any draft had a node, verified or not
    # Inputs of the output layer in the prompts, see `PassResult.states`.
    _states: list[torch.Tensor] = field(default_factory=list)

    @classmethod
    def over(
        cls,
        verifier: Verifier,
        drafter: Drafter,
        stats: DraftStats,
        *,
        max_draft_tokens: int | str,
        rows: int = 1,  # of a pass; 2 stands for any number of several
        chains: bool = False,
        is_probed: bool = True,  # whether the verifier was found exact; else it is probed first
        waits: bool = False,  # whether one call waits for all rows
        reads_prompts: bool = True,
        ranks: Ranks | None = None,
    ) -> Loop:
        """The loop of a call whose passes this verifier runs. `drafter` is that of all rows, or a
        plain [`Drafter`] if each row has its own."""
        limits = DraftLimits(
            verifier.kind, verifier.model, rows, verifier.model_kwargs, is_probed, stats
        )
        return cls(
            verifier=verifier,
            budget=make_budget(max_draft_tokens, drafter, verifier, waits),
            limits=limits,
            stats=stats,
            vocab_size=text_config(verifier.model).vocab_size,
            chains=chains or not verifier.kind.takes_trees,
            reads_prompts=reads_prompts,
            ranks=None if ranks is None or ranks.alone else ranks,
        )

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
            fraction = self._prompt_fraction(rows) if self.reads_prompts else 0.0
            steps = [Step(row) for row in rows]
            result = self._forward(steps, records=fraction > 0)
            top = self._accept(steps, result.logits)
            self._keep(steps)
            states = [*self._states, *result.states]
            has_top_tokens = self._agreed(top is not None)
            if states and has_top_tokens:
                self._observe_prompts(rows, result, states, fraction)
            self._states = []
            self._observe(steps, result.logits, top)

    def read_ahead(self, rows: Sequence[Row], length: int) -> None:
        """Runs the prompts up to this length; `prefill` runs the rest."""
        with self._timed("prefill_seconds"):
            records = self.reads_prompts and self._prompt_fraction(rows) > 0
            pieces = [FixedTokens(row.ids[:, :length]) for row in rows]
            drafts = [DraftTree.empty()] * len(rows)
            result = self.verifier.forward(pieces, drafts, records=records)
            self._states = [*self._states, *result.states]
            self.verifier.keep([[]] * len(rows))

    def _prompt_fraction(self, rows: Sequence[Row]) -> float:
        """The most that learning from the prompts may cost, as a part of the prefill."""
        drafters = [row.drafter for row in rows]
        fraction = max(d.prompt_fraction if d.observed_top_k else 0.0 for d in drafters)
        return self._agreed(fraction)  # the output layer may be split

    def _agreed(self, value: _Value) -> _Value:
        """The value of the first rank."""
        return value if self.ranks is None else self.ranks.agree(value)

    def step(self, steps: Sequence[Step]) -> None:
        """Verifies a draft for each row in one forward pass, and emits the accepted tokens and one
        more. Idle rows are left out."""
        with self._timed("drafting_seconds") as drafting_seconds:
            if self.ranks is None or self.ranks.is_first:
                self._draft(steps)
        self._cross_limits(steps)  # outside of all clocks: it may probe the model
        with self._timed("drafting_seconds"):
            trimmed = self._agreed(self.budget.trim(steps, drafting_seconds()))
            for step, verified in zip(steps, trimmed, strict=True):
                step.verified = verified
        with self._timed("verifying_seconds") as verifying_seconds:
            result = self._forward(steps)
            top = self._accept(steps, result.logits)
        with self._timed("other_seconds"):
            self._keep(steps)
            if result.is_step:
                self.budget.record(steps, result.pass_tokens, verifying_seconds())
        with self._timed("learning_seconds"):
            self._observe(steps, result.logits, top)

    def _draft(self, steps: Sequence[Step]) -> None:
        verifier = self.verifier
        max_nodes = min(self.budget.nodes(steps), verifier.entries.room(verifier.cached))
        for i, step in enumerate(steps):
            row = step.row
            if max_nodes <= 0 or step.is_idle:
                continue
            depth = self.limits.depth(len(row.seen), self._last_position(i, row))
            if row.draft_end is not None:
                depth = min(depth, row.draft_end - len(row) - 1)  # one token is the target's own
            if depth > 0:
                call = Call(
                    sampling=row.sampling,
                    chain=self.chains,
                    depth=depth,
                    speed=self.budget.speed,
                    noise=row.noise_ahead(self.vocab_size) if row.do_sample else None,
                )
                drafted = checked_draft(row.drafter, max_nodes, call, self.vocab_size)
                step.draft = drafted.truncated(depth)
        self.offered = self.offered or any(len(step.draft) for step in steps)

    def _cross_limits(self, steps: Sequence[Step]) -> None:
        """Probes the lengths that the texts have come to, once there is a draft to verify, and
        drops the drafts if they are refused there."""
        length = max(len(step.row.seen) for step in steps if not step.is_idle)
        is_drafted = any(len(step.draft) for step in steps)
        if not (self.limits.needs_probe(length) and self._agreed(is_drafted)):
            return
        self.limits.cross(length)
        if self.limits.refused is not None:
            for step in steps:
                step.draft = DraftTree.empty()

    def _last_position(self, index: int, row: Row) -> int:
        """The position of the last token of the row with this index."""
        assert self.verifier.inputs is not None
        return len(row.seen) - 1 + self.verifier.inputs.offsets[index]

    def _forward(self, steps: Sequence[Step], records: bool = False) -> PassResult:
        """A pass over the rows; its logits `(N, vocab_size)` are from each step's `root` on those
        of its nodes."""
        # The last token of an idle row must not run: the model may have no position for it.
        seen = [AllButLast(step.row.seen) if step.is_idle else step.row.seen for step in steps]
        drafts = [step.verified for step in steps]
        # Each rank has measured other costs, and padding makes a plain step a pass like others,
        # which may not have been found exact.
        pads = self.ranks is None and self.limits.is_exact
        padded_size = self.budget.padded_size if pads else int
        result = self.verifier.forward(seen, drafts, padded_size, records)
        for step, root in zip(steps, result.roots, strict=True):
            step.root = root
        return result

    def _keep(self, steps: Sequence[Step]) -> None:
        self.verifier.keep([step.path for step in steps])

    def _accept(self, steps: Sequence[Step], logits: torch.Tensor) -> TopTokens | None:
        """Lets each row take what the target model chooses. Returns the best next tokens at each
        node, if any drafter needs them and the kernels are loaded."""
        k = max(step.row.drafter.observed_top_k for step in steps)
        if drafting_kernels.compiled:
            top = top_tokens(logits[None], k) if k > 0 else None
            accept(steps, logits, None if top is None else top.choices[0])
            self._agree_on_tokens(steps)
            return top
        accept(steps, logits)  # no token waits for kernels
        self._agree_on_tokens(steps)
        is_ready = drafting_kernels.ready(in_call=logits.device.type == "cpu")
        return top_tokens(logits[None], k) if k > 0 and is_ready else None

    def _agree_on_tokens(self, steps: Sequence[Step]) -> None:
        """Gives each row the tokens of the first rank."""
        if self.ranks is None:
            return
        outcomes = [(step.path, step.emitted.tolist(), step.row.stopped_at) for step in steps]
        agreed = self.ranks.agree(outcomes)
        for step, outcome, (path, tokens, stopped_at) in zip(steps, outcomes, agreed, strict=True):
            if outcome != (path, tokens, stopped_at):
                step.path = path
                step.row.replace(len(outcome[1]), tokens, stopped_at)

    def _observe_prompts(
        self,
        rows: Sequence[Row],
        result: PassResult,
        states: list[torch.Tensor],
        fraction: float,
    ) -> None:
        """Shows the drafters what the target expects inside the prompts; by now each row is one
        token longer."""
        k = max(row.drafter.observed_top_k for row in rows)
        prompts = result.prompts or [*range(len(rows))]
        first = torch.tensor([prompts.index(prompt) for prompt in range(max(prompts) + 1)])
        last = result.logits[first.to(result.logits.device, non_blocking=True), None]
        # All prompts together cost no more than one would: drafts of several rows pay less.
        top = prompt_top_tokens(self.verifier.model, states, last, k, fraction / len(last))
        if top is None:
            return
        for i, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
            length = self._last_position(i, row)  # of the prompt without padding
            prompt_ids = row.seen.tail(1 + min(length, len(row.seen) - 1))[:-1]
            count = min(top.tokens.shape[1], len(prompt_ids) - 1)
            if count > 0 and row.drafter.prompt_fraction > 0:
                observation = Observation(
                    prompt_ids,
                    top_tokens=top.tokens[prompt, -count:],
                    top_probs=top.probs[prompt, -count:],
                    of_prompt=True,
                )
                row.drafter.observe(observation)

    def _observe(self, steps: Sequence[Step], logits: torch.Tensor, top: TopTokens | None) -> None:
        """Shows the drafters what was verified, and counts it."""
        counts = []
        for step in steps:
            if step.path is not None:
                places = slice(step.places.start, step.places.stop)
                observation = Observation(
                    step.emitted,
                    step.verified,
                    logits[places],
                    top_tokens=None if top is None else top.tokens[0, places],
                    top_probs=None if top is None else top.probs[0, places],
                )
                step.row.drafter.observe(observation)
                counts.append((len(step.verified), len(step.path)))
        self.stats.record_rows(counts)

    @contextmanager
    def _timed(self, name: str) -> Iterator[Callable[[], float]]:
        """Adds the seconds of its body to a field of the statistics. Yields a function that returns
        the seconds so far, or of the whole body once that is over."""
        began = self.clock()
        ended = None
        yield lambda: (self.clock() if ended is None else ended) - began
        ended = self.clock()
        setattr(self.stats, name, getattr(self.stats, name) + ended - began)
