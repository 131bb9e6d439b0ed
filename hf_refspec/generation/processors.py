"""Logits processors of a batch, taken apart for its rows.

Plain decoding asks them about all rows at once, which are equally long then. Rows with drafts are
not, so that each is asked about alone, as a batch of one: `(1, length)` ids with the row's own
padding, and `(1, vocab_size)` scores. That changes nothing where a row's answer depends on nothing
but the row:

- Those of transformers do so, and are shared by the rows. A few know rows by their number, and are
  made for each row; but guidance, which would run the model for each row by itself, is refused.
- Any other may keep state. Each row has a copy of its own, as of before the call, so that the copy
  sees what a call with this row alone would show it. What should look at several rows at once, or
  at a row's number, cannot be known as such and does not see them.
"""

from __future__ import annotations

import copy
import functools
import sys
from typing import Any

import torch
from transformers import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    LogitsProcessorList,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from .validation import RefusedCallError


def processors_of_rows(processors: LogitsProcessorList, rows: int) -> list[LogitsProcessorList]:
    """A list of logits processors for each of several rows."""
    return [
        LogitsProcessorList([_of_row(each, row, rows) for each in processors])
        for row in range(rows)
    ]


def _of_row(asked: Any, row: int, rows: int) -> Any:
    """The logits processor `asked` for one of several rows."""
    if isinstance(asked, PrefixConstrainedLogitsProcessor):
        of_row = functools.partial(_allowed_tokens, asked._prefix_allowed_tokens_fn, row)
        return PrefixConstrainedLogitsProcessor(of_row, num_beams=1)
    ignored = getattr(asked, "prompt_ignore_length", None)
    if isinstance(asked, RepetitionPenaltyLogitsProcessor) and isinstance(ignored, torch.Tensor):
        return RepetitionPenaltyLogitsProcessor(asked.penalty, ignored[row : row + 1])
    # Of several sequences of a prompt, transformers 5.17 penalises the first alone.
    uneven = (
        isinstance(asked, EncoderRepetitionPenaltyLogitsProcessor)
        and len(asked.encoder_input_ids) != rows
    )
    if uneven or isinstance(asked, UnbatchedClassifierFreeGuidanceLogitsProcessor):
        raise RefusedCallError(
            f"`candidate_generator` cannot be combined with a {type(asked).__name__} and several "
            "rows: it knows the rows by their number. Pass one prompt at a time."
        )
    own = _copied(asked)
    if isinstance(own, EncoderRepetitionPenaltyLogitsProcessor):
        own = copy.copy(own)
        own.encoder_input_ids = own.encoder_input_ids[row : row + 1]
    elif isinstance(own, EncoderNoRepeatNGramLogitsProcessor):
        own = copy.copy(own)
        prompt = row * own.batch_size // rows  # several sequences have one prompt
        own.generated_ngrams, own.batch_size = [own.generated_ngrams[prompt]], 1
    return own


def _copied(asked: Any) -> Any:
    """The logits processor itself if it keeps no state, else a copy."""
    stateless = type(asked).__module__.startswith("transformers.generation.")
    if stateless and not isinstance(asked, SynthIDTextWatermarkLogitsProcessor):
        return asked
    # Modules, which cannot be copied, are shared; those of outlines hold torch.
    modules = {id(module): module for module in list(sys.modules.values())}
    try:
        return copy.deepcopy(asked, modules)
    except Exception as error:  # whatever its state raises at being copied
        raise RefusedCallError(
            f"`logits_processor` has a {type(asked).__name__} that cannot be copied ({error!r}), "
            "and with `candidate_generator` each row needs its own. Let it be copied by "
            "`copy.deepcopy`, or pass one prompt at a time."
        ) from error


def _allowed_tokens(function: Any, row: int, batch_id: int, ids: torch.Tensor) -> list[int]:
    return function(row, ids)
