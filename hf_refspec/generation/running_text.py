"""One text of a running batch: what `generate` has prepared for it, and what becomes of it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Literal

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StaticCache,
    StoppingCriteriaList,
)
from transformers.generation import CandidateGenerator

from ..drafting.calls import drafter_call, remember_outputs
from ..drafting.candidates import as_drafter
from ..drafting.drafter import Drafter, Sampling
from ..drafting.stats import DraftStats
from ..text_config import text_config
from ..transformers_names import cache_name
from ..verification.caches import find_cache, is_padded, new_cache
from ..verification.choice import known_finding, select_verifier
from ..verification.in_place import InPlaceEntries
from ..verification.kinds import PLAIN, TREE
from ..verification.verifier import Verifier
from .default_drafter import drafter_of_call
from .loop import Loop
from .plain import why_plain
from .prefixes import CachedText, Prefixes, state_of
from .row import Row, prompt_tokens
from .step import Step
from .validation import FURTHER_OUTPUTS, check_request, check_steps

if TYPE_CHECKING:
    from transformers.generation import BaseStreamer


def prepare_text(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    candidate_generator: Drafter | CandidateGenerator | Literal["auto"] | None = "auto",
    streamer: BaseStreamer | None = None,
    seed: int | None = None,
    **model_kwargs: Any,
) -> RunningText:
    """Takes over a call from `generate`, for a running batch to decode."""
    check_request(input_ids, generation_config, model_kwargs, "candidate_generator")
    check_steps(model, model_kwargs, "candidate_generator")
    if len(input_ids) != 1:
        raise ValueError(
            f"`input_ids` has {len(input_ids)} rows, but a text of a running batch has one: add "
            "each by itself"
        )
    is_auto = candidate_generator is None or candidate_generator == "auto"
    drafter = None if is_auto else as_drafter(candidate_generator)
    if drafter is not None:
        drafter.check(text_config(model).vocab_size, logits_processor)
    kwargs = model_kwargs
    if why_plain(model, 1, (), kwargs) is None:
        kwargs = {name: value for name, value in kwargs.items() if name not in FURTHER_OUTPUTS}
    row = Row(input_ids, logits_processor, stopping_criteria, generation_config, streamer)
    verifier, joins = _verifier(model, generation_config, kwargs)
    if generation_config.do_sample:
        row.generator = torch.Generator(input_ids.device)
        row.generator.manual_seed(int(torch.randint(2**62, ())) if seed is None else seed)
    sampling = Sampling.of(generation_config)
    return RunningText(row, drafter, sampling, streamer, verifier, joins)


class RunningText:
    """A text that waits, is decoded or has ended.

    Attributes:
        input_ids (`torch.Tensor` of shape `(1, n)`): The prompt.
        finished (`bool`): Whether it has ended.
        shared_tokens (`int`): How many tokens of the prompt another text had in common, so that
            their keys and values were copied.
        stats ([`DraftStats`]): Of this text. Passes that it shares with others are counted,
            not timed.
        interrupted (`Callable`, *optional*): Asked before each piece of the prompt is read; the
            text ends if it returns `True`. Afterwards stopping criteria are asked.
    """

    def __init__(
        self,
        row: Row,
        drafter: Drafter | None,  # `None` is "auto"
        sampling: Sampling | None,
        streamer: BaseStreamer | None,
        verifier: Verifier,
        joins: bool,  # whether it shares its passes with others
    ) -> None:
        self.input_ids = row.ids
        self.finished = False
        self.shared_tokens = 0
        self.stats = DraftStats()
        self.interrupted: Callable[[], bool] | None = None
        self.row = row
        self.joins = joins
        self.verifier = verifier
        # Whether its prompt is read in pieces, and may share them: the first one might be nothing
        # but padding, and other positions give other keys and values.
        kwargs = verifier.model_kwargs
        usual = torch.arange(row.ids.shape[1], device=row.ids.device)  # positions
        self.in_pieces = (
            joins and not is_padded(kwargs) and bool((kwargs["position_ids"] == usual).all())
        )
        self._streamer = streamer
        self._drafter = drafter
        self._sampling = sampling
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
        """Whether one of its stopping criteria ended it."""
        return self.row.finished

    @property
    def unread(self) -> int:
        """How many tokens of the prompt have to run."""
        return self.input_ids.shape[1] - self._cached

    def begin(
        self,
        prefixes: Prefixes,
        running: Sequence[CachedText],
        prefill_tokens: int,
        max_draft_tokens: int | Literal["auto"],
    ) -> None:
        """Copies what the prompt has in common with other texts, and prepares to read the rest, in
        pieces of up to `prefill_tokens`."""
        verifier = self.verifier
        model = verifier.model
        vocab_size = text_config(model).vocab_size
        drafter = self._session.enter_context(drafter_of_call(model, self._drafter))
        prompts = prompt_tokens(self.input_ids, verifier.model_kwargs, vocab_size)
        drafters = drafter_call(drafter, prompts, vocab_size, self._sampling)
        [self.row.drafter] = self._session.enter_context(drafters)
        self.stats = drafter.stats
        if self._streamer is not None:
            self._streamer.put(self.input_ids.cpu())
            self._session.callback(self._streamer.end)
        weakref.finalize(self, self._session.close)  # a text that is dropped ends too
        if self.in_pieces:
            self._model_state = state_of(model)
            ids = self.row.tail(len(self.row))
            entries, self._cached = prefixes.longest(ids, self._model_state, running)
            self.shared_tokens = self._cached
            for layer, states in zip(verifier.entries.cache.layers, entries, strict=False):
                layer.update(*states)
            # The first piece is a prompt of its own. The length of its mask says that its ids hold
            # what is cached as well.
            kwargs = verifier.model_kwargs
            mask = kwargs.get("attention_mask")
            mask = torch.ones_like(self.input_ids) if mask is None else mask
            end = self._cached + prefill_tokens
            positions = kwargs["position_ids"][..., :end]
            verifier.model_kwargs |= {"attention_mask": mask[:, :end], "position_ids": positions}
        nodes = max_draft_tokens if verifier.kind.takes_several_tokens else 0
        self._loop = Loop.over(verifier, Drafter(), self.stats, max_draft_tokens=nodes)

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
        self._loop.step([Step(self.row)])

    def cached(self, verifier: Verifier, index: int) -> CachedText | None:
        """What others may share of it, as far as its row in a shared verifier is cached, until the
        next text leaves or step runs."""
        if not self.in_pieces:
            return None
        assert isinstance(verifier.entries, InPlaceEntries)
        entries = verifier.entries.cached_row(index, verifier.cached[index])
        if not entries:
            return None
        length = entries[0][0].shape[2]
        return CachedText(self.row.tail(len(self.row))[:length], entries, self._model_state)

    def end(self) -> None:
        """Frees what it holds but its tokens."""
        self.finished = True
        remember_outputs(self.stats, [self.row.drafter], [self.row.output])
        loop = self._loop
        self._loop = None
        verifier = self.verifier
        del self.verifier  # it holds the prompt's cache, and the text may be kept
        try:
            self._session.close()
        finally:
            if loop is not None and not self.joins:
                verifier.entries.release()


def _verifier(
    model: PreTrainedModel, config: GenerationConfig, model_kwargs: dict[str, Any]
) -> tuple[Verifier, bool]:
    """The verifier that reads the prompt, and whether its text then joins the others."""
    kwargs = model_kwargs
    if why_plain(model, 1, (), kwargs) is not None:
        return Verifier(PLAIN, model, config, kwargs), False
    if isinstance(find_cache(model_kwargs), StaticCache):
        # The prompt is read in pieces, and packed passes are not compiled.
        kwargs = {**model_kwargs, cache_name(model_kwargs): new_cache(model)}
    if TREE.supports(model, kwargs) and known_finding(TREE, model, 2, kwargs).exact:
        verifier = select_verifier(model, "auto", 1, config, kwargs).verifier
        if verifier is not None and verifier.entries.joins:
            return verifier, True
    verifier = select_verifier(model, "auto", 1, config, model_kwargs).verifier
    return verifier or Verifier(PLAIN, model, config, model_kwargs), False
