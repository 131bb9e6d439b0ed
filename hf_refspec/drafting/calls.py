"""The drafters of one call: each row's, from `begin` to `end`; and pools that lend each of several
threads its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from ..kernels.compilation import drafting_kernels
from ..text_config import text_tokenizer
from .blend import Blend, as_drafter
from .contract import Call, Drafter, Observation, States
from .stats import DraftStats, SourceStats
from .token_recycling import TokenRecycling
from .tree import DraftTree


class DrafterPool:
    """Lends a drafter, or a fork while it is in use; [`Drafter.fork`] says what forks share."""

    def __init__(self, drafter: Drafter) -> None:
        self._idle = [drafter]
        self._unused = drafter.fork()  # a drafter that is in use cannot be forked

    @contextmanager
    def drafter(self) -> Iterator[Drafter]:
        """A drafter that no other call has."""
        try:
            drafter = self._idle.pop()
        except IndexError:
            drafter = self._unused.fork()
        try:
            yield drafter
        finally:
            self._idle.append(drafter)


def default_drafters(
    memo: MutableMapping[Any, Any], vocab_size: int, further: Drafter | None = None
) -> DrafterPool:
    """The drafters of `"auto"` that a model's findings keep, for calls in several threads; with a
    `further` source of the model's own, if there is one."""
    key = ("default drafters", vocab_size)
    if key not in memo:
        drafter = as_drafter("auto") if further is None else Blend(["auto", further])
        _share_table(drafter, memo, vocab_size)
        memo.setdefault(key, DrafterPool(drafter))
    pool: DrafterPool = memo[key]
    return pool


def _share_table(drafter: Drafter, memo: MutableMapping[Any, Any], vocab_size: int) -> None:
    """Lets the `TokenRecycling` of `"auto"` learn into the table that a model's findings keep."""
    key = ("default table", vocab_size)
    for source in drafter.sources:
        if isinstance(source, TokenRecycling) and source.kept_at_model:
            if key not in memo:
                memo.setdefault(key, TokenRecycling(min(8, vocab_size)))
            source.learns_into(memo[key])


class LateDrafter(Drafter):
    """Replaces a drafter, which begins once the kernels are ready; drafts nothing until then."""

    def __init__(self, drafter: Drafter, prompt_ids: np.ndarray, vocab_size: int) -> None:
        self.drafter = drafter
        self.stats = drafter.stats
        self.decides_length = drafter.decides_length
        self.calibration = drafter.calibration
        self.observed_top_k = drafter.observed_top_k
        self.observed_outputs = drafter.observed_outputs
        self.begun = False
        self._prompt_ids = prompt_ids
        self._vocab_size = vocab_size
        self._missed: list[Observation] = []  # before it began

    @property
    def sources(self) -> Sequence[Drafter]:
        return self.drafter.sources

    def draft(self, budget: int, call: Call) -> DraftTree:
        return self.drafter.draft(budget, call) if self.begun else DraftTree.empty()

    def observe(self, observation: Observation) -> None:
        # A pass that ended before the kernels were ready has no top tokens: it begins at the next.
        is_complete = self.observed_top_k == 0 or observation.top_tokens is not None
        if not self.begun and is_complete and drafting_kernels.ready(in_call=True):
            self.begun = True
            self.drafter.begin(self._prompt_ids, self._vocab_size)
            if self._missed:
                tokens = np.concatenate([missed.tokens for missed in self._missed])
                states = [missed.states for missed in self._missed]
                self.drafter.observe(Observation(tokens, states=States.joined(states)))
        if self.begun:
            self.drafter.observe(observation)
        else:
            self._missed.append(Observation(observation.tokens, states=observation.states))

    def end(self) -> None:
        if self.begun:
            self.drafter.end()
        elif self._missed:
            drafting_kernels.ready()  # for the next call


@contextmanager
def drafter_call(
    drafter: Drafter,
    prompts: Sequence[np.ndarray],
    vocab_size: int,
    processors: Sequence[Any] | None = None,
    memo: MutableMapping[Any, Any] | None = None,
) -> Iterator[list[Drafter]]:
    """One call of a drafter, from `begin` to `end`, with fresh `stats`. Yields the drafter of each
    row: this one and forks of it; a [`LateDrafter`] for each until the kernels are ready.

    Args:
        drafter: Drafts for the first row.
        prompts: The prompt of each row, int64 of shape `(n,)`.
        vocab_size: The ids that the target model knows.
        processors: The logits processors of the call, where known.
        memo: The findings about the target model, which keep the table of `"auto"`.

    Raises:
        RuntimeError: If another call is using the drafter.
        ValueError: If it drafts ids outside of the vocabulary.
    """
    with ExitStack() as ends:
        for used in dict.fromkeys([*drafter.sources, drafter]):
            lock: threading.Lock = used.__dict__.setdefault("_in_use", threading.Lock())
            if not lock.acquire(blocking=False):
                raise RuntimeError(
                    f"this {type(used).__name__} is in use by another call; make one drafter per "
                    "thread, or fork() it"
                )
            ends.callback(lock.release)
        if memo is not None:
            _share_table(drafter, memo, vocab_size)
        drafter.check(vocab_size, processors)
        drafters = [drafter, *(drafter.fork() for _ in prompts[1:])]
        rows: list[Drafter] = []
        for row_drafter, prompt_ids in zip(drafters, prompts, strict=True):
            row_drafter.stats = DraftStats()
            # The first token should not wait the half second that the cache takes.
            if drafting_kernels.compiled and drafting_kernels.ready(in_call=True):
                ends.callback(row_drafter.end)
                row_drafter.begin(prompt_ids, vocab_size)
                rows.append(row_drafter)
            else:
                rows.append(LateDrafter(row_drafter, prompt_ids, vocab_size))
                ends.callback(rows[-1].end)
        yield rows
        for fork in drafters[1:]:
            drafter.stats.add_sources(fork.stats.sources)
        if drafter in drafter.sources:  # alone: the blend that it might be has counted its sources
            stats = drafter.stats
            name = type(drafter).__name__
            alone = SourceStats(name, stats.drafted, stats.accepted, first=stats.accepted)
            stats.add_sources([alone])


def remember_outputs(
    stats: DraftStats,
    drafters: Sequence[Drafter],
    outputs: Sequence[Sequence[int]],
    tokenizer: Any = None,
) -> None:
    """Lets `stats.copied` search each row's new tokens in `source_texts`, and a notebook show the
    text of a call with one row. Called before a call ends."""
    if tokenizer is not None and len(outputs) == 1:
        stats.text = outputs[0], text_tokenizer(tokenizer)
    for row, (drafter, output) in enumerate(zip(drafters, outputs, strict=True)):
        texts = [text for source in drafter.sources for text in source.source_texts()]
        stats.outputs.append((row, output, texts))
