"""The drafters of one call, from `begin` to `end`, and a stand-in for those that must wait."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from .compilation import drafting_kernels
from .drafter import Call, Drafter, Sampling, owned
from .observation import Observation
from .stats import DraftStats
from .tree import DraftTree


class AwaitingKernels(Drafter):
    """Stands in for a drafter, which begins as soon as the kernels are loaded; until then it drafts
    nothing."""

    def __init__(self, drafter: Drafter, prompt_ids: np.ndarray, vocab_size: int) -> None:
        self.drafter = drafter
        self.call = drafter.call
        self.calibration = drafter.calibration
        self.observed_top_k = drafter.observed_top_k
        self.prompt_fraction = drafter.prompt_fraction
        self.has_begun = False
        self._prompt_ids = prompt_ids
        self._vocab_size = vocab_size
        self._missed: list[np.ndarray] = []  # the tokens that were emitted before it began

    @property
    def sources(self) -> Sequence[Drafter]:
        return self.drafter.sources

    def begin_if_ready(self) -> bool:
        """Begins once the kernels are loaded; returns whether the drafter has begun."""
        if not self.has_begun and drafting_kernels.ready():
            self.has_begun = True
            self.drafter.begin(self._prompt_ids, self._vocab_size)
            if self._missed:
                self.drafter.observe(Observation(np.concatenate(self._missed)))
        return self.has_begun

    def draft(self, budget: int) -> DraftTree:
        return self.drafter.draft(budget) if self.has_begun else DraftTree.empty()

    def observe(self, observation: Observation) -> None:
        if self.begin_if_ready():
            self.drafter.observe(observation)
        elif not observation.of_prompt:
            self._missed.append(observation.tokens)

    def end(self) -> None:
        if self.has_begun:
            self.drafter.end()
        # They hold the call's budget and random numbers.
        self.drafter.call.speed = self.drafter.call.noise = None


@contextmanager
def drafter_call(
    drafter: Drafter,
    prompts: Sequence[np.ndarray],
    vocab_size: int,
    sampling: Sampling | None = None,
    processors: Sequence[Any] | None = None,
) -> Iterator[list[Drafter]]:
    """One call of a drafter, from `begin` to `end`, with fresh `stats`: yields the drafter of each
    row (itself, and forks), or an [`AwaitingKernels`]. Raises a RuntimeError if another call is
    using it, and a ValueError if it drafts from ids outside of the vocabulary."""
    with owned(drafter), ExitStack() as ends:
        drafter.check(vocab_size, processors)
        drafters = [drafter, *(drafter.fork() for _ in prompts[1:])]
        rows: list[Drafter] = []
        for row_drafter, prompt_ids in zip(drafters, prompts, strict=True):
            row_drafter.stats = DraftStats()
            row_drafter.call = Call(sampling)
            awaiting = AwaitingKernels(row_drafter, prompt_ids, vocab_size)
            ends.callback(awaiting.end)
            # Loading them takes half a second, which the first token should not wait for.
            begins_now = drafting_kernels.loaded and awaiting.begin_if_ready()
            rows.append(row_drafter if begins_now else awaiting)
        yield rows
        for fork in drafters[1:]:
            drafter.stats += DraftStats(sources=fork.stats.sources)


def remember_outputs(
    stats: DraftStats, drafters: Sequence[Drafter], outputs: Sequence[Sequence[int]]
) -> None:
    """Before a call ends, lets `stats.copied` search the new tokens of each row: in `source_texts`
    of each source."""
    for row, (drafter, output) in enumerate(zip(drafters, outputs, strict=True)):
        texts = [text for source in drafter.sources for text in source.source_texts()]
        stats.outputs.append((row, output, texts))
