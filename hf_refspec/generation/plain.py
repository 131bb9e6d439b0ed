"""Plain decoding in place of drafts: why a call needs it, and how it takes over one that has begun.

Where a probe or a forward pass has raised, transformers' own loop begins the call anew: it runs the
tokens that were emitted until then once more, but logits processors, stopping criteria and the
streamer, which may keep state, do not see them twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedModel,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation import BaseStreamer

from ..text_config import attends_locally, text_config
from ..verification.caches import find_cache, keeps_every_position
from ..verification.entries import crop_layers, restore, snapshot
from .batch import fits_single_rows
from .row import Row

if TYPE_CHECKING:
    from transformers import Cache


def why_plain(
    model: PreTrainedModel,
    rows: int,
    processors: Sequence[LogitsProcessor],
    model_kwargs: dict[str, Any],
) -> str | None:
    """Why drafts could change the text of a call with these arguments, if they could."""
    if model_kwargs.get("output_attentions"):
        return "`output_attentions=True` may change how the model attends; leave it out"
    for processor in processors if rows > 1 else ():
        if not fits_single_rows(processor, rows):
            return (
                f"a {type(processor).__name__} may know the {rows} rows by their number, and rows "
                "with drafts differ in length; pass one prompt at a time"
            )
    mask, cache = model_kwargs.get("attention_mask"), find_cache(model_kwargs)
    ends_in_padding = mask is not None and mask.ndim == 2 and not bool(mask[:, -1].all())
    local = isinstance(cache, StaticCache) and attends_locally(text_config(model))
    if local and ends_in_padding:
        return (
            "a prompt is padded on the right, and attention to nothing but padding depends on the "
            "length of the static cache; pad on the left"
        )
    return None


def cache_mark(cache: Cache | None) -> Callable[[], None]:
    """A function that gives a cache its present content again after a call was abandoned."""
    if cache is None:
        return lambda: None
    if keeps_every_position(cache) and (length := cache.get_seq_length()):
        return partial(crop_layers, cache, length)  # a snapshot would keep a copy alive
    layers, states = cache.layers, snapshot(cache)

    def go_back() -> None:
        cache.layers = layers
        restore(cache, states)

    return go_back


@dataclass(frozen=True)
class Emitted:
    """The rows of a call that begins anew. Criteria and the streamer have seen them up to the
    length `shown`."""

    rows: Sequence[Row]
    prompt_length: int
    shown: int

    def processors(self, processors: LogitsProcessorList) -> LogitsProcessorList:
        """Those of several rows are the same as in plain decoding, and keep no state."""
        if len(self.rows) > 1 or not self.rows[0].output:
            return processors
        return LogitsProcessorList([_EmittedTokens(self.rows[0], processors)])

    def criteria(self, criteria: StoppingCriteriaList) -> StoppingCriteriaList:
        return StoppingCriteriaList(
            criterion
            if type(criterion) is MaxLengthCriteria
            else _GivenAnswers(criterion, self.rows, self.shown)
            for criterion in criteria
        )

    def streamer(self, streamer: BaseStreamer | None) -> BaseStreamer | None:
        return None if streamer is None else _Rest(streamer, self.shown - self.prompt_length)


@dataclass
class _EmittedTokens(LogitsProcessor):
    """Leaves no choice but the tokens of a row, and then hands over to its processors."""

    row: Row
    processors: LogitsProcessorList

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if (length := input_ids.shape[1]) >= len(self.row):
            processed: torch.Tensor = self.processors(input_ids, scores)
            return processed
        emitted = torch.full_like(scores, -torch.inf)
        emitted[:, self.row.ids[0, length]] = 0
        return emitted


class _GivenAnswers(StoppingCriteria):
    """A criterion that has been asked up to a length."""

    def __init__(self, criterion: StoppingCriteria, rows: Sequence[Row], shown: int) -> None:
        self._criterion, self._rows, self._shown = criterion, rows, shown

    def __getattr__(self, name: str) -> Any:
        return getattr(self._criterion, name)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if (length := input_ids.shape[1]) > self._shown:
            answers: torch.Tensor = self._criterion(input_ids, scores, **kwargs)
            return answers
        ends = [row.stopped_at for row in self._rows]
        stopped = [end is not None and end <= length for end in ends]
        return torch.tensor(stopped, device=input_ids.device)


@dataclass
class _Rest(BaseStreamer):
    """A streamer that has been given some of the tokens."""

    streamer: BaseStreamer
    given: int

    def put(self, value: torch.Tensor) -> None:
        if self.given == 0:
            self.streamer.put(value)
        self.given = max(self.given - 1, 0)

    def end(self) -> None:
        self.streamer.end()
