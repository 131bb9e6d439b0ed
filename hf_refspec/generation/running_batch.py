"""Texts of many users, decoded together: rows that join and leave between forward passes.

A step is: a piece of the next prompt -> the loop's own step over all rows -> rows that have ended
leave. A prompt is prefilled by itself, in pieces, so that no other text waits longer than one piece
takes; then its keys and values join the others', see `entries.py`. Rows of models that cannot be
packed keep a loop of their own, and take turns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal

import psutil
import torch
from transformers import PreTrainedModel

from ..drafting.contract import Drafter
from ..drafting.stats import DraftStats
from ..messages import check_count
from ..refusals import RefusedCallError, check_options
from ..text_config import context_length, text_config
from ..transformers_names import CACHE_NAMES
from ..verification.ranks import Ranks
from ..version import untested_transformers
from .budget import make_budget
from .loop import Loop
from .plan import DraftLimits
from .request import warn_unread
from .running_text import CachedText, Prefixes, RunningText, prepare_text

# The length of a text by which the memory of a row is estimated.
_ROW_TOKENS = 4096


class RunningBatch:
    """Decodes texts of one model together. They join while others are decoded, and leave when they
    end; each has the logits processors, stopping criteria, streamer, random numbers and drafter of
    a call of its own, and in float32 the ids of a call of its own.

        batch = RunningBatch(model, max_rows=8)
        text = batch.add(**inputs, max_new_tokens=64)
        while not text.finished:
            batch.step()

    One thread at a time may call its methods. Once weights change, earlier keys and values are no
    longer shared; if you write only parts of a parameter's `data`, make a new batch.

    Args:
        model ([`PreTrainedModel`]): The target model.
        max_rows (`int`, *optional*): The most texts that are decoded at once; the others wait. By
            default as many texts of 4,096 tokens as half of the free memory holds, at most 16 on a
            CPU and 64 elsewhere.
        prefill_tokens (`int`, *optional*): The most tokens of prompts that run between two steps of
            the other texts. By default 128 on a CPU, 1024 elsewhere.
        prefix_tokens (`int`, *optional*, defaults to 4096): The most tokens of texts that have
            ended whose keys and values are kept, for prompts that begin with the same tokens (a
            system prompt, a document). 0 shares nothing, not even with running texts.
        max_draft_tokens (`int` or `"auto"`, *optional*, defaults to `"auto"`): As of `generate`;
            `"auto"` chooses the best nodes of all texts together.

    Raises:
        TypeError: If an option has the wrong type.
        ValueError: If an option has a value that it cannot have.
        RuntimeError: If this package is not tested with the installed transformers.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_rows: int | None = None,
        prefill_tokens: int | None = None,
        prefix_tokens: int = 4096,
        max_draft_tokens: int | Literal["auto"] = "auto",
    ) -> None:
        if (why := untested_transformers()) is not None:
            raise RuntimeError(f"{why}.")
        if prefill_tokens is None:
            prefill_tokens = 128 if model.device.type == "cpu" else 1024
        max_rows = _default_rows(model) if max_rows is None else max_rows
        check_count("max_rows", max_rows)
        check_count("prefill_tokens", prefill_tokens)
        check_count("prefix_tokens", prefix_tokens, least=0)
        check_options(max_draft_tokens, "auto")
        self.stats = DraftStats()
        self._model = model
        self.max_rows = max_rows
        self._prefill_tokens = prefill_tokens
        self._max_draft_tokens = max_draft_tokens
        self._prefixes = Prefixes(prefix_tokens)
        self._waiting: deque[RunningText] = deque()
        self._prefilling: RunningText | None = None
        # The texts that share their passes, the rows of one verifier, and the loop of these passes.
        self._packed: list[RunningText] = []
        self._packed_loop: Loop | None = None
        self._alone: list[RunningText] = []  # each with a loop of its own

    def __len__(self) -> int:
        """The number of texts that are decoded or wait."""
        return self.running + len(self._waiting)

    @property
    def running(self) -> int:
        """The number of texts that are decoded, including one whose prompt is being read."""
        return len(self._decoded) + (self._prefilling is not None)

    @property
    def _decoded(self) -> list[RunningText]:
        """The texts that have their first token."""
        return [*self._packed, *self._alone]

    @torch.no_grad()
    def add(
        self,
        *,
        seed: int | None = None,
        interrupted: Callable[[], bool] | None = None,
        **arguments: Any,
    ) -> RunningText:
        """Puts a text at the end of the queue.

        Args:
            seed (`int`, *optional*): The seed; the text equals the one that a
                separate call gives after `torch.manual_seed(seed)`. By default torch draws one.
            interrupted (`Callable`, *optional*): Asked before each piece of the prompt is read; the
                text ends if it returns `True`. Afterwards stopping criteria are asked.
            arguments: As of `generate`, for one prompt. Each text needs a drafter of its own;
                `candidate_generator` is `"auto"` unless given.

        Returns:
            [`RunningText`]: The text, which grows with each step.

        Raises:
            TypeError, ValueError: As `generate` does; also for several prompts, for a given cache,
                and for a model that is split over several processes.
        """
        for name in CACHE_NAMES:
            if arguments.get(name) is not None:
                raise ValueError(
                    f"`{name}` cannot be given for a text of a running batch: leave it out; "
                    "prefixes that the prompt shares with other texts are found"
                )
        if not Ranks.of(self._model).alone:
            raise RefusedCallError(
                "A model that is split over several processes cannot decode a running batch: texts "
                "would join at different times in each. Load it in one process, with `device_map`."
            )
        prepared = partial(prepare_text, seed=seed, interrupted=interrupted)
        text: Any = self._model.generate(**arguments, custom_generate=prepared)
        self._waiting.append(text)
        return text

    @torch.no_grad()
    def step(self) -> list[RunningText]:
        """Reads prompts, if there is room for their texts, and runs one step of all other texts.

        Returns:
            `list[RunningText]`: The texts that have ended.

        Raises:
            Whatever a forward pass, a drafter, a processor or a criterion raises. The text whose
            prompt was read then ends, or, in a pass that texts share, all of these.
        """
        ended_early = self._read_prompts()
        ended: list[RunningText] = []
        try:
            if self._packed_loop is not None and self._packed:
                accepted = self._packed_loop.step([text.row for text in self._packed])
                for text, taken in zip(self._packed, accepted.rows, strict=True):
                    text.stats.record_rows([(taken.verified, len(taken.path or ()))])
            for text in self._alone:
                text.step()
            ended = [text for text in self._decoded if text.complete]
            self._leave(ended)
        except BaseException:
            self._abandon(ended)
            raise
        _end(ended)
        return ended_early + ended

    def _read_prompts(self) -> list[RunningText]:
        """Reads short prompts or a piece of a long one; returns the texts that have ended."""
        ended: list[RunningText] = []
        left = self._prefill_tokens
        try:
            while (text := self._text_to_read()) is not None:
                size = min(text.unread, self._prefill_tokens) if text.in_pieces else text.unread
                if size > left < self._prefill_tokens:
                    break
                left -= size
                if self._read_piece(text, size):
                    ended.append(text)
        except BaseException:
            if (text := self._prefilling) is not None:  # whose prompt cannot be read
                self._prefilling = None
                text.end()
            raise
        return ended

    def _text_to_read(self) -> RunningText | None:
        """The text whose prompt is being read, or the next one, if there is room for it."""
        if self._prefilling is None and self._waiting and self.running < self.max_rows:
            self._prefilling = self._waiting.popleft()
            self._prefilling.begin(
                self._prefixes,
                [cached for _, cached in self._cached()],
                self._prefill_tokens,
                self._max_draft_tokens,
            )
        return self._prefilling

    def _read_piece(self, text: RunningText, size: int) -> bool:
        """Runs the next `size` tokens of a prompt; returns whether the text has ended."""
        interrupted = text.interrupted is not None and text.interrupted()
        if not interrupted and size < text.unread:
            text.read(size)
            return False
        if not interrupted:
            text.prefill()
        self._prefilling = None
        if interrupted or text.complete:
            text.end()
            return True
        try:
            self._join(text)
        except BaseException:  # the others may hold a part of it
            self._abandon([text])
            raise
        return False

    def _join(self, text: RunningText) -> None:
        """Lets a text that has its first token take part in the steps."""
        if not text.joins:
            self._alone.append(text)
            return
        loop = self._packed_loop
        if loop is None or not self._packed:
            # It keeps its own verifier, which returns the hidden states that it asks for.
            verifier = text.verifier
            if loop is None:
                budget = make_budget(self._max_draft_tokens, Drafter(), verifier)
            else:
                budget = loop.budget
            limits = DraftLimits(verifier, self.stats, rows=2)
            self._packed_loop = Loop(verifier, budget, limits, self.stats)
        else:
            loop.verifier.join(text.verifier)
            if text.row.drafter.observed_outputs:
                warn_unread(self._model, "several texts are decoded together")
        self._packed.append(text)

    def _cached(self) -> list[tuple[RunningText, CachedText]]:
        """The texts that others may share something with, see [`RunningText.cached`]."""
        if self._packed_loop is None:
            return []
        verifier = self._packed_loop.verifier
        texts = ((text, text.cached(verifier, i)) for i, text in enumerate(self._packed))
        return [(text, cached) for text, cached in texts if cached is not None]

    def _leave(self, texts: Sequence[RunningText]) -> None:
        """Takes texts out of all later steps; keeps what their prompts may share with others."""
        if not texts:
            return
        for text, cached in self._cached():
            if text in texts:
                self._prefixes.keep(cached)
        kept = [i for i, text in enumerate(self._packed) if text not in texts]
        if len(kept) < len(self._packed) and self._packed_loop is not None:
            self._packed = [self._packed[i] for i in kept]
            self._packed_loop.verifier.select(kept)
        self._alone = [text for text in self._alone if text not in texts]

    def _abandon(self, ended: Sequence[RunningText]) -> None:
        """Ends all texts that have left the queue, and these."""
        texts = [*self._decoded, *([self._prefilling] if self._prefilling else [])]
        texts += [text for text in ended if text not in texts]
        self._packed = []
        self._packed_loop = None
        self._alone = []
        self._prefilling = None
        _end(texts)


def _end(texts: Sequence[RunningText]) -> None:
    """Ends texts, whatever a drafter or a streamer raises."""
    with ExitStack() as ending:
        for text in reversed(texts):
            ending.callback(text.end)


def _default_rows(model: PreTrainedModel) -> int:
    """The number of texts that a running batch decodes at once, see [`RunningBatch`]."""
    config = text_config(model)
    device = model.device
    queries = _size(config, "num_attention_heads") or 1
    heads = _size(config, "num_key_value_heads") or queries
    head_dim = _size(config, "head_dim") or (_size(config, "hidden_size") or 4096) // queries
    layers = _size(config, "num_hidden_layers") or 32
    token_bytes = 2 * layers * heads * head_dim * model.dtype.itemsize
    if device.type == "cuda":
        free_bytes = torch.cuda.mem_get_info(device)[0]
    else:
        free_bytes = psutil.virtual_memory().available
    tokens = min(context_length(config) or _ROW_TOKENS, _ROW_TOKENS)
    max_rows = 16 if device.type == "cpu" else 64
    return max(1, min(max_rows, free_bytes // 2 // (tokens * token_bytes)))


def _size(config: Any, name: str) -> int | None:
    """A size of a model; `None` if it has none, or its layers differ (Gemma 4)."""
    try:
        value = getattr(config, name, None)
    except RuntimeError:
        return None
    return value if isinstance(value, int) else None
