"""One text of a running batch, from the arguments that `generate` has prepared to its end, and the
prefixes that texts have in common, whose keys and values are computed once."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal

import numpy as np
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StaticCache,
    StoppingCriteriaList,
)
from transformers.generation import BaseStreamer, CandidateGenerator

from ..drafting.calls import remember_outputs
from ..drafting.contract import Drafter
from ..drafting.stats import DraftStats
from ..drafting.token_ids import common_length
from ..refusals import why_plain
from ..text_config import vocab_size_of
from ..transformers_names import cache_name
from ..verification.caches import KeysAndValues, find_cache, has_padding, new_cache
from ..verification.entries import InPlaceEntries
from ..verification.model_memo import state_of
from ..verification.probe import ProbedCall, finding_about, select_verifier
from ..verification.verifier import PLAIN, TREE, Verifier
from .budget import make_budget
from .loop import Loop
from .plan import DraftLimits
from .request import Request
from .row import Row

# A prefix is shared from this many tokens on: copying fewer is not worth looking for them.
_LEAST_SHARED = 16


@dataclass(frozen=True)
class CachedText:
    """The cached ids `(n,)` of a text, their keys and values
    `(1, heads, n, head_dim)`, and the state of the model that computed them."""

    ids: np.ndarray
    entries: KeysAndValues
    state: tuple[Any, ...]


class Prefixes:
    """Texts that have ended and stay cached, the latest of up to `tokens` in all."""

    def __init__(self, tokens: int) -> None:
        self._max_tokens = tokens
        self._kept: deque[CachedText] = deque()

    def keep(self, text: CachedText) -> None:
        """Copies a text that leaves, unless it is so long that it would displace all others."""
        if not 0 < len(text.ids) <= self._max_tokens:
            return
        copied = [(keys.clone(), values.clone()) for keys, values in text.entries]
        self._kept.append(replace(text, entries=copied))
        while sum(len(text.ids) for text in self._kept) > self._max_tokens:
            self._kept.popleft()

    def longest(
        self, ids: np.ndarray, state: tuple[Any, ...], running: Sequence[CachedText]
    ) -> tuple[KeysAndValues, int]:
        """The keys and values `(1, heads, n, head_dim)` of each layer of the longest prefix that a
        prompt has in common with a kept or a `running` text, and its length n, without the last
        token of the prompt."""
        if self._max_tokens == 0:
            return [], 0
        texts = [text for text in chain(self._kept, running) if text.state == state]
        lengths = [common_length(ids[:-1], text.ids) for text in texts]
        longest = max(lengths, default=0)
        if longest < _LEAST_SHARED:
            return [], 0
        shared = texts[lengths.index(longest)].entries
        return [(keys[:, :, :longest], values[:, :, :longest]) for keys, values in shared], longest


def prepare_text(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    candidate_generator: Drafter | CandidateGenerator | Literal["auto"] | None = "auto",
    streamer: BaseStreamer | None = None,
    seed: int | None = None,
    interrupted: Callable[[], bool] | None = None,
    **model_kwargs: Any,
) -> RunningText:
    """Takes over a call from `generate`, for a running batch to decode."""
    request = Request(
        model=model,
        input_ids=input_ids,
        logits_processor=logits_processor,
        stopping_criteria=stopping_criteria,
        generation_config=generation_config,
        candidate_generator=candidate_generator,
        streamer=streamer,
        model_kwargs=model_kwargs,
    )
    if len(input_ids) != 1:
        raise ValueError(
            f"`input_ids` has {len(input_ids)} rows, but a text of a running batch has one: add "
            "each by itself"
        )
    if request.drafter is not None:
        request.drafter.check(vocab_size_of(model), logits_processor)
    verifier, joins = _verifier(request)
    generator = None
    if generation_config.do_sample:
        generator = torch.Generator(input_ids.device)
        drawn = torch.randint(2**62, (), device="cpu") if seed is None else seed
        generator.manual_seed(int(drawn))
    row = Row(
        input_ids,
        logits_processor,
        stopping_criteria,
        generation_config,
        streamer,
        generator=generator,
    )
    return RunningText(request, row, verifier, joins, interrupted)


class RunningText:
    """A text that waits, is being decoded or has ended.

    Attributes:
        input_ids (`torch.Tensor` of shape `(1, n)`): The prompt.
        finished (`bool`): True once it has ended, for whatever reason.
        shared_tokens (`int`): Tokens of the prompt whose keys and values were copied from another
            text.
        stats ([`DraftStats`]): Counts and times of this text. Passes that it shares with others are
            counted, not timed.
    """

    def __init__(
        self,
        request: Request,
        row: Row,
        verifier: Verifier,
        joins: bool,
        interrupted: Callable[[], bool] | None,
    ) -> None:
        self.input_ids = request.input_ids
        self.finished = False
        self.shared_tokens = 0
        self.stats = DraftStats()
        self.interrupted = interrupted
        self.row = row
        self.joins = joins  # true if it shares its passes with others
        self.verifier = verifier
        # True if its prompt is read in pieces, and may share them. The first piece must not be
        # padding alone, and other positions would have other keys and values.
        kwargs = verifier.model_kwargs
        usual = torch.arange(row.ids.shape[1], device=row.ids.device)  # positions
        self.in_pieces = (
            joins and not has_padding(kwargs) and bool((kwargs["position_ids"] == usual).all())
        )
        self._request: Request | None = request  # until it begins
        self._cached = 0  # tokens of the prompt that the cache holds
        self._model_state: tuple[Any, ...] = ()  # when it began
        self._session = ExitStack()  # from its first piece to its end
        self._loop: Loop | None = None

    @property
    def sequences(self) -> torch.Tensor:
        """Prompt and output so far, int64 of shape `(1, length)`, as `generate` returns them."""
        return self.row.ids

    @property
    def complete(self) -> bool:
        """True if one of its stopping criteria ended it."""
        return self.row.stopped_at is not None

    @property
    def unread(self) -> int:
        """The number of tokens of the prompt that have to run."""
        return self.input_ids.shape[1] - self._cached

    def begin(
        self,
        prefixes: Prefixes,
        running: Sequence[CachedText],
        prefill_tokens: int,
        max_draft_tokens: int | Literal["auto"],
    ) -> None:
        """Copies the longest prefix that the prompt has in common with another text, and prepares
        to read the rest, in pieces of up to `prefill_tokens`."""
        assert self._request is not None
        request = self._request
        verifier = self.verifier
        [drafter] = self._session.enter_context(request.drafters())
        self.row.draft_by(drafter)
        self.stats = drafter.stats
        if request.streamer is not None:
            request.streamer.put(self.input_ids.cpu())
            self._session.callback(request.streamer.end)
        weakref.finalize(self, self._session.close)  # a text that is dropped ends too
        if self.in_pieces:
            self._model_state = state_of(request.model)
            ids = self.row.tail(len(self.row))
            entries, self._cached = prefixes.longest(ids, self._model_state, running)
            self.shared_tokens = self._cached
            layers = verifier.entries.cache.layers
            for layer, (keys, values) in zip(layers, entries, strict=False):
                layer.update(keys, values)
            # The first piece is a prompt of its own; the length of its mask shows that its ids
            # include the cached ones.
            kwargs = verifier.model_kwargs
            mask = kwargs.get("attention_mask")
            mask = torch.ones_like(self.input_ids) if mask is None else mask
            end = self._cached + prefill_tokens
            positions = kwargs["position_ids"][..., :end]
            verifier.model_kwargs |= {"attention_mask": mask[:, :end], "position_ids": positions}
        nodes = 0 if verifier.kind is PLAIN else max_draft_tokens
        budget = make_budget(nodes, Drafter(), verifier)
        self._loop = Loop(verifier, budget, DraftLimits(verifier, self.stats), self.stats)
        self._request = None

    def read(self, size: int) -> None:
        """Runs the next tokens of the prompt, but not the last one."""
        assert self._loop is not None
        end = self._cached + size
        self._loop.read_ahead([self.row], end)
        self._cached = end

    def prefill(self) -> None:
        """Runs the rest of the prompt, and emits the first token."""
        assert self._loop is not None
        self._loop.prefill([self.row])

    def step(self) -> None:
        """Verifies a draft in a pass of its own."""
        assert self._loop is not None
        self._loop.step([self.row])

    def cached(self, verifier: Verifier, index: int) -> CachedText | None:
        """The text as far as its row in a shared verifier is cached, for others to share; valid
        until the next text leaves or step runs. `None` if they cannot."""
        if not self.in_pieces:
            return None
        assert isinstance(verifier.entries, InPlaceEntries)
        entries = verifier.entries.cached_row(index, verifier.cached[index])
        if not entries:
            return None
        length = entries[0][0].shape[2]
        return CachedText(self.row.tail(len(self.row))[:length], entries, self._model_state)

    def end(self) -> None:
        """Frees all that it holds except its tokens."""
        self.finished = True
        remember_outputs(self.stats, [self.row.drafter], [self.row.output])
        self._loop = None
        self._request = None
        del self.verifier  # it holds the prompt's cache, and the text may be kept
        self._session.close()


def _verifier(request: Request) -> tuple[Verifier, bool]:
    """The verifier that reads the prompt, and whether its text then joins the others."""
    model = request.model
    config = request.generation_config
    kwargs = request.pass_kwargs
    if why_plain(model, request.input_ids, request.logits_processor, request.model_kwargs) is None:
        if isinstance(find_cache(kwargs), StaticCache):
            # The prompt is read in pieces, and packed passes are not compiled.
            kwargs = {**kwargs, cache_name(kwargs): new_cache(model)}
        verifier = select_verifier(model, "auto", 1, config, kwargs).verifier
        if verifier is not None:
            probed = ProbedCall(TREE, model, 2, kwargs)
            joins = TREE.supports(model, kwargs) and finding_about(probed).exact
            return verifier, joins and verifier.entries.joins
    return Verifier(PLAIN, model, config, kwargs), False
