"""One text of a running batch: what `generate` has prepared for it, and what becomes of it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
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
from ..verification.cache import find_cache, is_padded, new_cache
from ..verification.chain import PlainVerifier
from ..verification.choice import known_finding, select_verifier
from ..verification.tree import TreeVerifier
from ..verification.verifier import Verifier
from .default_drafter import drafter_of_call
from .loop import Loop
from .row import Row, prompt_tokens
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
    kwargs = {name: value for name, value in model_kwargs.items() if name not in FURTHER_OUTPUTS}
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
        self._row, self._streamer = row, streamer
        self._drafter, self._sampling = drafter, sampling
        self._verifier, self._joins = verifier, joins
        # Whether its prompt is read in pieces, and may share them: the first one might be nothing
        # but padding, and other positions give other keys and values.
        kwargs = verifier.model_kwargs
        usual = torch.arange(row.ids.shape[1], device=row.ids.device)  # positions
        self._in_pieces = (
            joins and not is_padded(kwargs) and bool((kwargs["position_ids"] == usual).all())
        )
        self._read = 0  # tokens of the prompt that the cache holds
        self._state: tuple[Any, ...] = ()  # of the model when it began
        self._session = ExitStack()  # from its first piece to its end
        self._loop: Loop | None = None  # its own, until it joins the others

    @property
    def sequences(self) -> torch.Tensor:
        """Prompt and output so far, int64 of shape `(1, length)`, as `generate` returns them."""
        return self._row.ids

    @property
    def complete(self) -> bool:
        """Whether one of its stopping criteria ended it."""
        return self._row.finished

    @property
    def _ids(self) -> np.ndarray:
        return self._row.tail(len(self._row))

    def _begin(self, model: PreTrainedModel) -> None:
        vocab_size = self._verifier.vocab_size
        drafter = self._session.enter_context(drafter_of_call(model, self._drafter))
        prompts = prompt_tokens(self.input_ids, self._verifier.model_kwargs, vocab_size)
        drafters = drafter_call(drafter, prompts, vocab_size, self._sampling)
        [self._row.drafter] = self._session.enter_context(drafters)
        self.stats = drafter.stats
        if self._streamer is not None:
            self._streamer.put(self.input_ids.cpu())
            self._session.callback(self._streamer.end)
        weakref.finalize(self, self._session.close)  # a text that is dropped ends too

    def _end(self) -> None:
        self.finished = True
        remember_outputs(self.stats, [self._row.drafter], [self._row.output])
        loop, self._loop = self._loop, None
        del self._verifier  # it holds the prompt's cache, and the text may be kept
        try:
            self._session.close()
        finally:
            if loop is not None:
                loop.verifier.release()


def _verifier(
    model: PreTrainedModel, config: GenerationConfig, model_kwargs: dict[str, Any]
) -> tuple[Verifier, bool]:
    """The verifier that reads the prompt, and whether its text then joins the others."""
    kwargs = model_kwargs
    if isinstance(find_cache(model_kwargs), StaticCache):
        # The prompt is read in pieces, and packed passes are not compiled.
        kwargs = {**model_kwargs, cache_name(model_kwargs): new_cache(model)}
    if TreeVerifier.supports(model, kwargs) and known_finding(TreeVerifier, model, 2, kwargs).exact:
        verifier, _ = select_verifier(model, "auto", 1, config, kwargs)
        if isinstance(verifier, TreeVerifier) and verifier.joins:
            return verifier, True
    verifier, _ = select_verifier(model, "auto", 1, config, model_kwargs)
    return verifier or PlainVerifier(model, config, model_kwargs), False
