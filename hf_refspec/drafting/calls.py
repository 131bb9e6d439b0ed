"""The drafters of one call: from `begin` to `end`, and what stands in for one that cannot begin."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np

from .compilation import drafting_kernels
from .drafter import Call, Drafter, Sampling, check_vocabulary, owned
from .observation import Observation
from .stats import SpeculationStats
from .tree import DraftTree


class AwaitingKernels(Drafter):
    """Stands in for a drafter while the kernels are being compiled: it drafts nothing."""

    def __init__(self, drafter: Drafter, prompt_ids: np.ndarray, vocab_size: int) -> None:
        self.drafter = drafter
        self.prompt_fraction = drafter.prompt_fraction  # it may begin before it observes the prompt
        self.arguments = prompt_ids, vocab_size  # of `begin`
        self.has_begun = False

    def draft(self, budget: int) -> DraftTree:
        return DraftTree.empty()

    def end(self) -> None:
        if self.has_begun:
            self.drafter.end()
        self.drafter.call.speed = None  # it holds the call's budget


def begun(drafter: Drafter, emitted: Sequence[int] = ()) -> Drafter:
    """The drafter of a row from now on: one that awaits its kernels begins if they are ready by
    now, and then observes what was emitted so far."""
    if not isinstance(drafter, AwaitingKernels) or not drafting_kernels.ready():
        return drafter
    drafter.has_begun = True
    drafter.drafter.begin(*drafter.arguments)
    if emitted:
        drafter.drafter.observe(Observation(np.array(emitted, dtype=np.int64)))
    return drafter.drafter


@contextmanager
def drafter_call(
    drafter: Drafter,
    prompts: Sequence[np.ndarray],
    vocab_size: int,
    sampling: Sampling | None = None,
) -> Iterator[list[Drafter]]:
    """One call of a drafter, from `begin` to `end`, with fresh `stats`: yields the drafter of each
    row (itself, and forks), or what stands in for it, see [`begun`]. Raises a RuntimeError if
    another call is using it, and a ValueError if it drafts from ids outside of the vocabulary."""
    with owned(drafter), ExitStack() as ends:
        drafters = [drafter, *(drafter.fork() for _ in prompts[1:])]
        rows = []
        for each, prompt_ids in zip(drafters, prompts, strict=True):
            each.stats, each.call = SpeculationStats(), Call(sampling)
            check_vocabulary(each, vocab_size)
            awaiting = AwaitingKernels(each, prompt_ids, vocab_size)
            ends.callback(awaiting.end)
            rows.append(begun(awaiting) if drafting_kernels.loaded else awaiting)
        yield rows
        for fork in drafters[1:]:
            drafter.stats += SpeculationStats(sources=fork.stats.sources)
