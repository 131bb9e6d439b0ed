"""Plain decoding in place of drafts: why a call needs it, and how it takes over one that has begun.

Where a probe or a forward pass has raised, transformers' own loop begins the call anew. It runs the
tokens that were emitted until then once more, but logits processors, stopping criteria and the
streamer, which may keep state, do not see them twice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import LogitsProcessorList, StaticCache, StoppingCriteriaList
from transformers.generation import BaseStreamer, GenerateDecoderOnlyOutput

from ..drafting.calls import remember_outputs
from ..drafting.drafter import Drafter
from ..drafting.observation import Observation
from ..text_config import attends_locally, text_config
from ..transformers_names import CACHE_NAMES, ends_and_padding, transformers_loop
from ..verification.caches import find_cache, keeps_every_position
from ..verification.entries import crop_layers, restore, snapshot
from ..verification.random_state import random_state, set_random_state
from .batch import fits_single_rows
from .request import Request
from .row import Row

logger = logging.getLogger("hf_refspec")


def why_plain(request: Request) -> str | None:
    """Why drafts could change the text of a call, if they could."""
    kwargs = request.model_kwargs
    if kwargs.get("output_attentions"):
        return "`output_attentions=True` may change how the model attends; leave it out"
    rows = len(request.input_ids)
    for processor in request.logits_processor if rows > 1 else ():
        if not fits_single_rows(processor, rows):
            return (
                f"a {type(processor).__name__} may know the {rows} rows by their number, and rows "
                "with drafts differ in length; pass one prompt at a time"
            )
    is_static = isinstance(find_cache(kwargs), StaticCache)
    mask = kwargs.get("attention_mask") if attends_locally(text_config(request.model)) else None
    if is_static and mask is not None and mask.ndim == 2 and not bool(mask[:, -1].all()):
        return (
            "a prompt is padded on the right, and attention to nothing but padding depends on the "
            "length of the static cache; pad on the left"
        )
    return None


def mark_start(request: Request) -> Callable[[], None]:
    """A function that restores the random numbers and the cache of a call for it to begin anew."""
    device = request.input_ids.device
    numbers = random_state(device)
    cache: Any = find_cache(request.model_kwargs)
    layers = None if cache is None else cache.layers
    length = cache.get_seq_length() if cache is not None and keeps_every_position(cache) else 0
    # Of a cache that can be cropped, a snapshot would keep a copy alive.
    states = None if cache is None or length else snapshot(cache)

    def go_back() -> None:
        set_random_state(device, numbers)
        if states is not None:
            cache.layers = layers
            restore(cache, states)
        elif cache is not None:
            crop_layers(cache, length)

    return go_back


@dataclass(frozen=True)
class Abandoned:
    """A call whose forward pass has raised: why it decodes plainly, its rows, the length up to
    which criteria and the streamer have seen them, and the random numbers after that."""

    why: str
    rows: Sequence[Row]
    shown: int
    numbers: list[torch.Tensor]


def decode_plainly(
    request: Request, drafters: Sequence[Drafter], why: str, abandoned: Abandoned | None = None
) -> GenerateDecoderOnlyOutput | torch.Tensor:
    """Plain decoding by transformers itself; the drafters observe its tokens."""
    name = type(request.model).__name__
    logger.warning("%s decodes plainly, with the same text and no speed-up: %s.", name, why)
    stats = drafters[0].stats
    stats.reason = why
    stats.verification = "none"
    processors = request.logits_processor
    criteria = request.stopping_criteria
    streamer = request.streamer
    known = [0] * len(drafters)  # tokens of each row that were counted and observed before
    if abandoned is not None:
        rows = abandoned.rows
        known = [len(row.output) for row in rows]
        if len(rows) == 1:  # the processors of several rows keep no state
            processors = _KnownTokens(processors, rows[0])
        criteria = _KnownAnswers(criteria, abandoned)
        if streamer is not None:
            streamer = _FurtherTokens(streamer, abandoned.shown - request.prompt_length)
    kwargs = request.model_kwargs
    if request.adds_cache:
        request.generation_config.use_cache = False
        others = {name: value for name, value in kwargs.items() if name not in CACHE_NAMES}
        kwargs = {**others, "use_cache": False}
    output = transformers_loop(
        request.model,
        request.input_ids,
        logits_processor=processors,
        stopping_criteria=criteria,
        generation_config=request.generation_config,
        streamer=streamer,
        **kwargs,
    )
    if abandoned is not None and abandoned.rows[0].scores:
        # The others are those of a choice between one token.
        output.scores = (*abandoned.rows[0].scores, *output.scores[known[0] :])
    ids = output if isinstance(output, torch.Tensor) else output.sequences
    new_ids = ids[:, request.prompt_length :].numpy(force=True).astype(np.int64)
    emitted = [_without_padding(row, request) for row in new_ids]
    for column in range(new_ids.shape[1]):
        spans = zip(known, emitted, strict=True)
        stats.record_rows([(0, 0) for begin, tokens in spans if begin <= column < len(tokens)])
    remember_outputs(stats, drafters, [tokens.tolist() for tokens in emitted])
    for drafter, begin, tokens in zip(drafters, known, emitted, strict=True):
        for token in tokens[begin:]:
            drafter.observe(Observation(token[None]))
    return output


def _without_padding(new_ids: np.ndarray, request: Request) -> np.ndarray:
    """The new ids of a row without the padding behind the end of one that ended early."""
    eos, pad = ends_and_padding(request.generation_config)
    if len(request.input_ids) == 1 or eos is None or pad is None:
        return new_ids
    ends = np.flatnonzero(np.isin(new_ids, eos.numpy(force=True)))
    if len(ends):
        return new_ids[: ends[0] + 1]
    return new_ids[: np.flatnonzero(new_ids != int(pad)).max(initial=-1) + 1]  # another criterion


class _KnownTokens(LogitsProcessorList):
    """Leaves no choice but the tokens that a row has; processes the logits after them."""

    def __init__(self, processors: LogitsProcessorList, row: Row) -> None:
        super().__init__(processors)
        self._row = row

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        length = input_ids.shape[1]
        if length >= len(self._row):
            return super().__call__(input_ids, scores, **kwargs)
        known = torch.full_like(scores, -torch.inf)
        known[:, self._row.ids[0, length]] = 0
        return known


class _KnownAnswers(StoppingCriteriaList):
    """Repeats when rows were stopped; asks the criteria about the lengths after them."""

    def __init__(self, criteria: StoppingCriteriaList, abandoned: Abandoned) -> None:
        super().__init__(criteria)
        self._abandoned = abandoned

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        length = input_ids.shape[1]
        if length > self._abandoned.shown:
            return super().__call__(input_ids, scores, **kwargs)
        rows = self._abandoned.rows
        if len(rows) == 1 and length == len(rows[0]):
            # Processors that draw random numbers were not asked about the known tokens again.
            set_random_state(input_ids.device, self._abandoned.numbers)
        ends = [row.stopped_at for row in rows]
        stopped = [end is not None and end <= length for end in ends]
        return torch.tensor(stopped, device=input_ids.device)


class _FurtherTokens(BaseStreamer):
    """A streamer that already has the first tokens."""

    def __init__(self, streamer: BaseStreamer, known: int) -> None:
        self._streamer = streamer
        self._known = known

    def put(self, value: torch.Tensor) -> None:
        if self._known == 0:
            self._streamer.put(value)
        self._known = max(self._known - 1, 0)

    def end(self) -> None:
        self._streamer.end()
