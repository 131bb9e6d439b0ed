"""One text of a running batch: what `generate` has prepared for it, and what becomes of it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation import CandidateGenerator

from ..drafting.calls import drafter_call
from ..drafting.candidates import as_drafter
from ..drafting.drafter import Drafter, Sampling, check_vocabulary
from ..drafting.stats import SpeculationStats
from ..text_config import text_config
from ..verification.cache import is_padded
from ..verification.verifier import Verifier
from .default_drafter import default_drafter
from .loop import Loop
from .row import Row, prompt_tokens
from .validation import FURTHER_OUTPUTS, check_request, check_steps

if TYPE_CHECKING:
    from transformers.generation import BaseStreamer


@dataclass(frozen=True)
class _Call:
    """A call as `generate` has prepared it."""

    input_ids: torch.Tensor
    logits_processor: LogitsProcessorList
    stopping_criteria: StoppingCriteriaList
    generation_config: GenerationConfig
    drafter: Drafter | None  # `None` is "auto"
    streamer: BaseStreamer | None
    model_kwargs: dict[str, Any]


def prepare_call(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    candidate_generator: Drafter | CandidateGenerator | Literal["auto"] | None = "auto",
    streamer: BaseStreamer | None = None,
    **model_kwargs: Any,
) -> _Call:
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
        check_vocabulary(drafter, text_config(model).vocab_size)
    kwargs = {name: value for name, value in model_kwargs.items() if name not in FURTHER_OUTPUTS}
    asked = logits_processor, stopping_criteria, generation_config
    return _Call(input_ids, *asked, drafter, streamer, kwargs)


class RunningText:
    """A text that waits, is decoded or has ended.

    Attributes:
        input_ids (`torch.Tensor` of shape `(1, n)`): The prompt.
        finished (`bool`): Whether it has ended.
        shared_tokens (`int`): How many tokens of the prompt another text had in common, so that
            their keys and values were copied.
        stats ([`SpeculationStats`]): Of this text. Passes that it shares with others are counted,
            not timed.
        interrupted (`Callable`, *optional*): Asked again and again while the prompt is read; the
            text ends as soon as it returns `True`. Afterwards stopping criteria are asked.
    """

    def __init__(
        self,
        call: _Call,
        seed: int | None,
        verifier: Verifier,
        joins: bool,
    ) -> None:
        self.input_ids = call.input_ids
        self.finished = False
        self.shared_tokens = 0
        self.stats = SpeculationStats()
        self.interrupted: Callable[[], bool] | None = None
        self._call = call
        self._verifier = verifier
        self._joins = joins  # whether it shares its passes with others
        # Whether its prompt is read in pieces, and may share them: the first one might be nothing
        # but padding, and other positions give other keys and values.
        self._in_pieces = joins and not is_padded(call.model_kwargs) and _counts(call.model_kwargs)
        self._read = 0  # tokens of the prompt that the cache holds
        self._state: tuple[Any, ...] = ()  # of the model when it began
        self._session = ExitStack()  # from its first piece to its end
        self._loop: Loop | None = None  # its own, until it joins the others
        asked = call.logits_processor, call.stopping_criteria, call.generation_config
        self._row = Row(call.input_ids, *asked, call.streamer)
        if call.generation_config.do_sample:
            self._row.generator = torch.Generator(call.input_ids.device)
            seed = int(torch.randint(2**62, ())) if seed is None else seed
            self._row.generator.manual_seed(seed)

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
        call, vocab_size = self._call, self._verifier.vocab_size
        own = default_drafter(model) if call.drafter is None else nullcontext(call.drafter)
        drafter = self._session.enter_context(own)
        [prompt] = prompt_tokens(call.input_ids, call.model_kwargs, vocab_size)
        sampling = Sampling.of(call.generation_config)
        drafters = drafter_call(drafter, [prompt], vocab_size, sampling)
        [self._row.drafter] = self._session.enter_context(drafters)
        self.stats = drafter.stats
        if call.streamer is not None:
            call.streamer.put(call.input_ids.cpu())
            self._session.callback(call.streamer.end)
        weakref.finalize(self, self._session.close)  # a text that is dropped ends too

    def _end(self) -> None:
        self.finished = True
        loop, self._loop = self._loop, None
        del self._call, self._verifier  # they hold the prompt's cache, and the text may be kept
        try:
            self._session.close()
        finally:
            if loop is not None:
                loop.verifier.release()


def _counts(model_kwargs: dict[str, Any]) -> bool:
    """Whether the positions of a prompt are 0, 1, 2 and so on."""
    positions = model_kwargs["position_ids"]
    return bool((positions == torch.arange(positions.shape[-1], device=positions.device)).all())
