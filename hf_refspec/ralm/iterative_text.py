"""The text of iterative RaLM: steps of a few tokens, each behind the passage that it retrieved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from transformers.generation import BaseStreamer

from ..drafting.contract import Drafter
from ..generation.loop import Loop
from ..generation.row import Row, RowMark
from ..retrieval.knowledge_base import KnowledgeBase
from ..retrieval.retriever import Retrieved, Retriever
from .checked_search import RalmError, call
from .passage_contexts import Context, ContextChange, PassageContexts


class Passages:
    """The passages of one call, cut to `room` tokens (no limit if it is `None`)."""

    def __init__(self, retriever: Retriever, room: int | None, vocab_size: int) -> None:
        self.retriever = retriever
        self._room = room
        self.vocab_size = vocab_size
        self._tokens: dict[int, np.ndarray] = {}
        base = getattr(retriever, "knowledge_base", None)
        if isinstance(base, KnowledgeBase):
            base.check(vocab_size)

    def __getitem__(self, passage_id: int) -> np.ndarray:
        """The tokens of a passage, int64; all of them must be the model's."""
        if passage_id in self._tokens:
            return self._tokens[passage_id]
        tokens = np.asarray(call(self.retriever, "passage", passage_id))
        name = f"{type(self.retriever).__name__}.passage({passage_id})"
        if tokens.ndim != 1 or (len(tokens) and not np.issubdtype(tokens.dtype, np.integer)):
            raise RalmError(
                f"{name} must be the ids of its tokens, a 1-D array of integers, but has the shape "
                f"{tokens.shape} and the dtype {tokens.dtype}."
            )
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < self.vocab_size:
            raise RalmError(
                f"{name} has ids from {tokens.min()} to {tokens.max()}, but the model's vocabulary "
                f"has {self.vocab_size} tokens. Was the knowledge base built with another "
                "tokenizer?"
            )
        self._tokens[passage_id] = tokens[: self._room].astype(np.int64)
        return self._tokens[passage_id]


@dataclass(slots=True, eq=False)
class IterativeStep:
    """The tokens behind one passage, and what it takes to go back to before them."""

    passage: np.ndarray
    before: RowMark
    change: ContextChange
    end: int  # the length of the text after it


@dataclass
class IterativeText:
    """The text of one call, see [`RetrievalAugmentedGeneration`], with drafts from the passage, the
    prompt and the output."""

    row: Row
    contexts: PassageContexts
    passages: Passages
    drafter: Drafter
    max_draft_tokens: int | str
    prompt: np.ndarray  # without padding, int64
    stride: int  # the tokens of a step
    query_length: int
    streamer: BaseStreamer | None  # receives each token once it is verified
    _loop: Loop | None = None  # the first context's
    _unverified: list[IterativeStep] = field(default_factory=list)
    # The context that the drafter has observed, and the text's length by then. It begins anew where
    # the text goes on behind another passage, or was rolled back.
    _observed: tuple[Context, int] | None = None

    @property
    def finished(self) -> bool:
        return self.row.finished

    def query(self) -> Any:
        last = self.row.tail(min(self.query_length, len(self.row.output)))
        ids = np.concatenate([self.prompt, last])[-self.query_length :]
        return call(self.passages.retriever, "encode", ids)

    def step(self, found: Retrieved) -> IterativeStep:
        row = self.row
        drafter = self.drafter
        passage = self.passages[int(found.ids[0])]
        end = len(row) + self.stride
        before = row.mark()
        context, change = self.contexts.enter(passage)
        verifier = context.verifier
        step = IterativeStep(passage, before, change, end)
        self._unverified.append(step)
        row.seen = context
        row.drafter = drafter
        row.draft_end = end if row.max_length is None else min(end, row.max_length)
        if self._observed != (context, len(row)):
            ids = context.ids[0].numpy(force=True).astype(np.int64)
            drafter.begin(ids, self.passages.vocab_size)
        if self._loop is None:
            nodes = self.max_draft_tokens
            self._loop = Loop.over(verifier, drafter, drafter.stats, max_draft_tokens=nodes)
        # What it has learned stays. Each new context reads the prompt again: drafters have seen it.
        limits = self._loop.limits.of(verifier)
        loop = replace(self._loop, verifier=verifier, limits=limits, reads_prompts=not row.output)
        self._loop = loop
        while not row.finished and len(row) < end:
            if verifier.cached:
                loop.step([row])
            else:
                loop.prefill([row])
        step.end = len(row)
        self._observed = (context, step.end)
        return step

    def agrees(self, step: IterativeStep, truth: Retrieved) -> bool:
        # Two passages may be the same text.
        return np.array_equal(step.passage, self.passages[int(truth.ids[0])])

    def roll_back(self, step: IterativeStep) -> None:
        while step in self._unverified:
            last = self._unverified.pop()
            self.contexts.undo(last.change)
            self.row.roll_back(last.before)
        self._observed = None

    def commit(self, steps: Sequence[IterativeStep]) -> None:
        if not steps:
            return
        del self._unverified[: len(steps)]
        if self.streamer is not None:
            for token in self.row.ids[0, steps[0].before.length : steps[-1].end].cpu():
                self.streamer.put(token[None])
