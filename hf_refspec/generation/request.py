"""A call as `generate` hands it over, once it has been checked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation import BaseStreamer, CandidateGenerator

from ..drafting.calls import as_drafter, default_drafters, drafter_call
from ..drafting.contract import Drafter
from ..refusals import FURTHER_OUTPUTS, check_prepared
from ..text_config import text_config
from ..transformers_names import ends_and_padding
from ..verification.model_memo import memo_of
from .row import prompt_tokens


@dataclass(frozen=True)
class Request:
    """The arguments of a call as `generate` has prepared them. Raises a ValueError if the call
    cannot be lossless."""

    model: PreTrainedModel
    input_ids: torch.Tensor
    logits_processor: LogitsProcessorList
    stopping_criteria: StoppingCriteriaList
    generation_config: GenerationConfig
    candidate_generator: Drafter | CandidateGenerator | Literal["auto"] | None
    streamer: BaseStreamer | None
    model_kwargs: dict[str, Any]
    adds_cache: bool = False  # whether plain decoding would have no cache

    def __post_init__(self) -> None:
        _ = self.drafter  # which raises a TypeError if it is no drafter
        check_prepared(
            self.model,
            self.input_ids,
            self.generation_config,
            self.model_kwargs,
            "candidate_generator",
        )

    @cached_property
    def drafter(self) -> Drafter | None:
        """The drafter of the call; `None` stands for the model's own of `"auto"`."""
        generator = self.candidate_generator
        return None if generator is None or generator == "auto" else as_drafter(generator)

    @property
    def prompt_length(self) -> int:
        """The tokens of each prompt, including padding."""
        return self.input_ids.shape[1]

    @cached_property
    def pass_kwargs(self) -> dict[str, Any]:
        """`model_kwargs` without further outputs, which nobody gets; but a model that is asked for
        its attentions may attend in another way."""
        return {
            name: value
            for name, value in self.model_kwargs.items()
            if name not in FURTHER_OUTPUTS or (name == "output_attentions" and value)
        }

    @property
    def pads(self) -> bool:
        """Whether a row that has ended is padded, as in plain decoding: if there is an end-of-text
        token. Otherwise (stop strings alone) it goes on until all rows have ended."""
        return any(hasattr(criterion, "eos_token_id") for criterion in self.stopping_criteria)

    @property
    def pad_id(self) -> int:
        _, pad = ends_and_padding(self.generation_config)
        # For one row the host would wait for a GPU without need.
        return 0 if pad is None or len(self.input_ids) == 1 else int(pad)

    @contextmanager
    def drafters(self) -> Iterator[list[Drafter]]:
        """The drafter of each row, for the time of the call."""
        vocab_size = text_config(self.model).vocab_size
        memo = memo_of(self.model)
        with ExitStack() as stack:
            drafter = self.drafter
            if drafter is None:
                pool = default_drafters(memo, vocab_size)
                drafter = stack.enter_context(pool.drafter())
            call = drafter_call(
                drafter,
                prompt_tokens(self.input_ids, self.model_kwargs, vocab_size),
                vocab_size,
                processors=self.logits_processor,
                memo=memo,
            )
            yield stack.enter_context(call)
