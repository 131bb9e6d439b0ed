"""A call as `generate` hands it over, and its rows.

Rows with drafts have different lengths, so each logits processor is asked about each row alone, as
a batch of one: `(1, length)` ids with the row's padding, and `(1, vocab_size)` scores. Rows share
the processors of transformers, except the few that know rows by their number. With any other
processor the rows are decoded plainly.

Each row asks the stopping criteria of transformers as soon as it has a token. Other criteria may
count their calls or judge all rows together (lm-eval's stops when each row has had its stop
string), so they are asked about all rows at once, one length after another; tokens of a row after
a stop are dropped. A streamer gets the tokens of all rows at once too.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Literal

import torch
from transformers import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    GenerationConfig,
    LogitsProcessorList,
    PrefixConstrainedLogitsProcessor,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    SynthIDTextWatermarkLogitsProcessor,
)
from transformers.generation import BaseStreamer, CandidateGenerator

from ..drafting.blend import as_drafter, blend_of_model
from ..drafting.calls import default_drafters, drafter_call
from ..drafting.candidates import HiddenStateDrafts
from ..drafting.contract import Drafter
from ..refusals import (
    FURTHER_OUTPUTS,
    check_prepared,
    is_of_transformers,
    knows_one_row,
    why_unread,
)
from ..text_config import vocab_size_of
from ..transformers_names import ends_and_padding, hidden_state_generator, prefix_constraint
from ..verification.model_memo import memo_of
from ..verification.ranks import Ranks
from .row import ColumnNoise, Row, longest_row, padded_ids, prompt_tokens

logger = logging.getLogger("hf_refspec")


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
    adds_cache: bool = False  # true if plain decoding would have no cache
    # The arguments by which transformers would draft from hidden states.
    reading: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: Any = None

    def __post_init__(self) -> None:
        _ = self.drafter, self.reader  # raises an error for what does not draft
        check_prepared(
            self.model,
            self.input_ids,
            self.generation_config,
            self.model_kwargs,
            "candidate_generator",
        )

    @cached_property
    def drafter(self) -> Drafter | None:
        """The drafter of the call; `None` for the model's own of `"auto"`."""
        generator = self.candidate_generator
        is_default = generator is None or generator == "auto"
        if is_default and (not self.reading or "use_mtp" in self.reading):
            return None
        drafter = as_drafter("auto" if is_default else generator)
        if not self.reading:
            return drafter
        assistant = self.reading.get("assistant_model")
        config = getattr(assistant, "generation_config", None)  # whose values a generator copies
        key = (*self._layers, id(assistant), getattr(assistant, "device", None), repr(config))
        return blend_of_model(drafter, self.model, key, self._new_reader)

    @cached_property
    def reader(self) -> HiddenStateDrafts | None:
        """The source that reads hidden states beside the model's own drafter of `"auto"`, if the
        call asks for one."""
        return self._new_reader() if self.reading and self.drafter is None else None

    def _new_reader(self) -> HiddenStateDrafts:
        if self.reading.get("assistant_model") is not None:
            return HiddenStateDrafts(hidden_state_generator(self.model, **self.reading))
        memo = memo_of(self.model)
        if self._layers not in memo:  # they come from the disk
            generator = hidden_state_generator(self.model, **self.reading)
            memo[self._layers] = HiddenStateDrafts(generator)
        reader: HiddenStateDrafts = memo[self._layers].fork()
        return reader

    @property
    def _layers(self) -> tuple[Any, ...]:
        """The key of the model's layers for multi-token prediction, which share its embeddings."""
        model = self.model
        shared = id(model.get_input_embeddings()), id(model.get_output_embeddings())
        return "multi-token prediction", model.dtype, model.device, *shared

    @cached_property
    def pass_kwargs(self) -> dict[str, Any]:
        """`model_kwargs` with the further outputs that a drafter observes, and no others, which
        nobody gets; but a model that is asked for its attentions may attend in another way."""
        observing = self.reader if self.drafter is None else self.drafter
        observed = {} if observing is None else observing.observed_outputs
        if observed and (why := why_unread(self.model, self.input_ids, self.model_kwargs)):
            warn_unread(self.model, why)
            observed = {}
        kept = {
            name: value
            for name, value in self.model_kwargs.items()
            if name not in FURTHER_OUTPUTS or (name == "output_attentions" and value)
        }
        return {**kept, **observed}

    @property
    def pads(self) -> bool:
        """True if a row that has ended is padded, as in plain decoding with an end-of-text token.
        Otherwise (stop strings alone) it is decoded until all rows have ended."""
        return any(hasattr(criterion, "eos_token_id") for criterion in self.stopping_criteria)

    @property
    def pad_id(self) -> int:
        _, pad = ends_and_padding(self.generation_config)
        # For one row the host would wait for a GPU without need.
        return 0 if pad is None or len(self.input_ids) == 1 else int(pad)

    @contextmanager
    def drafters(self) -> Iterator[list[Drafter]]:
        """The drafter of each row, for the time of the call."""
        vocab_size = vocab_size_of(self.model)
        memo = memo_of(self.model)
        with ExitStack() as stack:
            drafter = self.drafter
            if drafter is None:
                if self.reader is not None:
                    memo = memo.setdefault((*self._layers, "drafters"), {})
                pool = default_drafters(memo, vocab_size, self.reader)
                drafter = stack.enter_context(pool.drafter())
            call = drafter_call(
                drafter,
                prompt_tokens(self.input_ids, self.model_kwargs, vocab_size),
                vocab_size,
                processors=self.logits_processor,
                memo=memo,
            )
            drafters = stack.enter_context(call)
            if isinstance(self.candidate_generator, Drafter):  # which a blend may hold
                self.candidate_generator.stats = drafter.stats
            yield drafters


def warn_unread(model: PreTrainedModel, why: str) -> None:
    """Warns once for a model and a reason that nothing is drafted from its hidden states."""
    if why not in (logged := memo_of(model).setdefault("unread", set())):
        logger.warning("nothing is drafted from hidden states: %s.", why)
    logged.add(why)


@dataclass
class BatchCriteria:
    """Stopping criteria that are asked about all rows of a call at once, once for each length, and
    the streamer, which gets a token of each row, padding included. The first of the `ranks`
    decides."""

    criteria: StoppingCriteriaList
    streamer: BaseStreamer | None
    asked: int  # the length up to which they have been asked, at first the prompts'
    pads: bool  # true if a row that has ended is padded, else decoded until all have ended
    pad_id: int
    ranks: Ranks

    def ask(self, rows: Sequence[Row]) -> None:
        """Asks about the lengths that all rows have reached since, stops rows, and streams."""
        while self.asked < self._reached(rows):
            self.asked += 1
            ids = padded_ids(rows, self.asked, self.pads, self.pad_id)
            stops = self.ranks.agree(self.criteria(ids, None).tolist()) if self.criteria else []
            for row, stopped in zip(rows, stops, strict=bool(stops)):
                if stopped:  # it may be longer by now, or have been ended before
                    row.stop(self.asked)
            if self.streamer is not None:
                self.streamer.put(ids[:, -1].cpu())

    def _reached(self, rows: Sequence[Row]) -> int:
        """The length that the call would have reached with its rows decoded in step."""
        lengths = [len(row) for row in rows if row.stopped_at is None or not self.pads]
        return min([*lengths, longest_row(rows)])


def rows_of(
    request: Request, drafters: Sequence[Drafter], ranks: Ranks, noise: ColumnNoise | None = None
) -> tuple[list[Row], BatchCriteria | None]:
    """The rows of a call with their drafters, and criteria and streamer that rows have together."""
    count = len(request.input_ids)
    noises = [None if noise is None else partial(noise.of, i) for i in range(count)]
    config = request.generation_config
    processors = request.logits_processor
    criteria = request.stopping_criteria
    if count == 1:
        row = Row(
            request.input_ids,
            processors,
            criteria,
            config,
            request.streamer,
            drafters[0],
            noise=noises[0],
        )
        return [row], None
    row_criteria = StoppingCriteriaList()
    batch_criteria = StoppingCriteriaList()
    for criterion in criteria:
        (row_criteria if is_of_transformers(criterion) else batch_criteria).append(criterion)
    rows = []
    for i, drafter in enumerate(drafters):
        ids = request.input_ids[i : i + 1]
        own_processors = [processor_of_row(processor, i, count) for processor in processors]
        own_processors = LogitsProcessorList(own_processors)
        row = Row(ids, own_processors, row_criteria, config, drafter=drafter, noise=noises[i])
        rows.append(row)
    if not batch_criteria and request.streamer is None:
        return rows, None
    return rows, BatchCriteria(
        criteria=batch_criteria,
        streamer=request.streamer,
        asked=request.input_ids.shape[1],
        pads=request.pads,
        pad_id=request.pad_id,
        ranks=ranks,
    )


def processor_of_row(processor: Any, row: int, rows: int) -> Any:
    """The logits processor for one of several rows."""
    if isinstance(processor, PrefixConstrainedLogitsProcessor):
        function, prompt = prefix_constraint(processor, row)
        return PrefixConstrainedLogitsProcessor(lambda _, ids: function(prompt, ids), num_beams=1)
    ignored = getattr(processor, "prompt_ignore_length", None)
    is_repetition = isinstance(processor, RepetitionPenaltyLogitsProcessor)
    if is_repetition and isinstance(ignored, torch.Tensor):
        return RepetitionPenaltyLogitsProcessor(processor.penalty, ignored[row : row + 1])
    if knows_one_row(processor) or isinstance(processor, SynthIDTextWatermarkLogitsProcessor):
        return copy.deepcopy(processor)  # they keep state
    if isinstance(processor, EncoderRepetitionPenaltyLogitsProcessor):
        processor = copy.copy(processor)
        processor.encoder_input_ids = processor.encoder_input_ids[row : row + 1]
    elif isinstance(processor, EncoderNoRepeatNGramLogitsProcessor):
        processor = copy.copy(processor)
        prompt = row * processor.batch_size // rows  # several sequences have one prompt
        processor.generated_ngrams = [processor.generated_ngrams[prompt]]
        processor.batch_size = 1
    return processor
