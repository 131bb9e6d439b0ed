"""Logits processors, stopping criteria and the streamer of a batch, taken apart for its rows.

Rows with drafts have different lengths, so each logits processor is asked about each row alone, as
a batch of one: `(1, length)` ids with the row's padding, and `(1, vocab_size)` scores. Rows share
those of transformers; the few that know rows by their number are made for each row. With any other
the rows are decoded plainly.

Each row asks the stopping criteria of transformers as soon as it has a token. Any other may count
its calls, or speak of all rows together (lm-eval's stops when each row has had its stop string): it
is asked about all rows at once, one length after another, and what a row had beyond a stop is
dropped. A streamer gets the tokens of all rows at once too.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from ..transformers_names import prefix_constraint
from ..verification.ranks import Ranks
from .row import Row, longest_row, padded

if TYPE_CHECKING:
    from transformers.generation import BaseStreamer


@dataclass
class BatchCriteria:
    """Stopping criteria that are asked about all rows of a call at once, once for each length, and
    the streamer that gets a token of each row, the padding too.

    A row that has ended is padded with `pad_id` where the call `pads`. Otherwise it goes on until
    it is as long as the longest. The answers that the first of the `ranks` gets count.
    """

    criteria: StoppingCriteriaList
    streamer: BaseStreamer | None
    asked: int  # the length up to which they have been asked, at first of the prompts
    pads: bool
    pad_id: int
    ranks: Ranks

    def ask(self, rows: Sequence[Row]) -> None:
        """Asks about the lengths that all rows have come to since, stops rows, and streams."""
        while self.asked < self._reached(rows):
            self.asked += 1
            ids = padded(rows, self.asked, self.pads, self.pad_id)
            stops = self.ranks.agree(self.criteria(ids, None).tolist()) if self.criteria else []
            for row, stopped in zip(rows, stops, strict=bool(stops)):
                if stopped:  # it may be longer by now, or have been ended before
                    row.stopped_at = min(self.asked, row.stopped_at or self.asked)
            if self.streamer is not None:
                self.streamer.put(ids[:, -1].cpu())

    def _reached(self, rows: Sequence[Row]) -> int:
        """The length that the call has come to, were its rows decoded in step."""
        going = [len(row) for row in rows if not (row.finished and self.pads)]
        return min([*going, longest_row(rows)])


def fits_single_rows(asked: Any, rows: int) -> bool:
    """Whether a logits processor gives the same scores when it is asked about each of several rows
    alone: transformers' own (no subclass of them) and this package's. Others may know the rows by
    their number."""
    if type(asked) is EncoderRepetitionPenaltyLogitsProcessor:
        # A prompt of several sequences stands there once.
        return len(asked.encoder_input_ids) == rows
    return type(asked) is not UnbatchedClassifierFreeGuidanceLogitsProcessor and (
        _knows_one_row(asked) or is_of_transformers(asked)
    )


def _knows_one_row(asked: Any) -> bool:
    """Whether a logits processor says that it is to be asked about one row, each by a copy."""
    return getattr(type(asked), "knows_one_row", False)


def is_of_transformers(asked: Any) -> bool:
    """Whether a processor or a criterion is one of transformers' own."""
    return type(asked).__module__.startswith("transformers.generation.")


def processor_of_row(asked: Any, row: int, rows: int) -> Any:
    """The logits processor `asked`, which [`fits_single_rows`], for one of several rows."""
    if isinstance(asked, PrefixConstrainedLogitsProcessor):
        function, prompt = prefix_constraint(asked, row)
        return PrefixConstrainedLogitsProcessor(lambda _, ids: function(prompt, ids), num_beams=1)
    ignored = getattr(asked, "prompt_ignore_length", None)
    if isinstance(asked, RepetitionPenaltyLogitsProcessor) and isinstance(ignored, torch.Tensor):
        return RepetitionPenaltyLogitsProcessor(asked.penalty, ignored[row : row + 1])
    if _knows_one_row(asked) or isinstance(asked, SynthIDTextWatermarkLogitsProcessor):
        return copy.deepcopy(asked)  # they keep state
    own = asked
    if isinstance(asked, EncoderRepetitionPenaltyLogitsProcessor):
        own = copy.copy(asked)
        own.encoder_input_ids = own.encoder_input_ids[row : row + 1]
    elif isinstance(asked, EncoderNoRepeatNGramLogitsProcessor):
        own = copy.copy(asked)
        prompt = row * own.batch_size // rows  # several sequences have one prompt
        own.generated_ngrams, own.batch_size = [own.generated_ngrams[prompt]], 1
    return own
