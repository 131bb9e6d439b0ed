"""Logits processors, stopping criteria and the streamer of a batch, taken apart for its rows.

Rows with drafts have different lengths, so each logits processor is asked about each row alone, as
a batch of one: `(1, length)` ids with the row's padding, and `(1, vocab_size)` scores. Rows share
those of transformers; the few that know rows by their number are made for each row. Any other may
keep state, and each row has a copy from before the call.

Each row asks the stopping criteria of transformers as soon as it has a token. Any other may count
its calls, or speak of all rows together (lm-eval's stops when each row has had its stop string): it
is asked about all rows at once, one length after another, and what a row had beyond a stop is
dropped. A streamer gets the tokens of all rows at once too.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
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
from .validation import RefusedCallError

if TYPE_CHECKING:
    from transformers.generation import BaseStreamer

# Objects of xgrammar and llguidance that are not Python's, which `copy.deepcopy` cannot copy:
# what they compile never changes, and what reads a text has a method of its own.
_COPIED: dict[tuple[str, str], Callable[[Any], Any]] = {
    ("xgrammar.compiler", "CompiledGrammar"): lambda shared: shared,
    ("xgrammar.matcher", "GrammarMatcher"): lambda matcher: matcher.fork(),
    ("builtins", "LLTokenizer"): lambda shared: shared,
    ("builtins", "LLMatcher"): lambda matcher: matcher.deep_copy(),
}


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


def processor_of_row(asked: Any, row: int, rows: int) -> Any:
    """The logits processor `asked` for one of several rows."""
    if isinstance(asked, PrefixConstrainedLogitsProcessor):
        function, prompt = prefix_constraint(asked, row)
        return PrefixConstrainedLogitsProcessor(lambda _, ids: function(prompt, ids), num_beams=1)
    ignored = getattr(asked, "prompt_ignore_length", None)
    if isinstance(asked, RepetitionPenaltyLogitsProcessor) and isinstance(ignored, torch.Tensor):
        return RepetitionPenaltyLogitsProcessor(asked.penalty, ignored[row : row + 1])
    # A prompt of several sequences stands there once.
    uneven = (
        isinstance(asked, EncoderRepetitionPenaltyLogitsProcessor)
        and len(asked.encoder_input_ids) != rows
    )
    if uneven or isinstance(asked, UnbatchedClassifierFreeGuidanceLogitsProcessor):
        raise RefusedCallError(
            f"`candidate_generator` cannot be combined with a {type(asked).__name__} and several "
            "rows: it knows the rows by their number. Pass one prompt at a time."
        )
    own = copied_processor(asked)
    if isinstance(own, EncoderRepetitionPenaltyLogitsProcessor):
        own = copy.copy(own)
        own.encoder_input_ids = own.encoder_input_ids[row : row + 1]
    elif isinstance(own, EncoderNoRepeatNGramLogitsProcessor):
        own = copy.copy(own)
        prompt = row * own.batch_size // rows  # several sequences have one prompt
        own.generated_ngrams, own.batch_size = [own.generated_ngrams[prompt]], 1
    return own


def copied_processor(asked: Any) -> Any:
    """The logits processor itself if it keeps no state, else a copy.

    Raises:
        ValueError: If it cannot be copied.
    """
    stateless = type(asked).__module__.startswith("transformers.generation.")
    if stateless and not isinstance(asked, SynthIDTextWatermarkLogitsProcessor):
        return asked
    # Modules, which cannot be copied, are shared; those of outlines hold torch.
    known = {id(module): module for module in list(sys.modules.values())}
    try:
        for held in getattr(asked, "__dict__", {}).values():
            for part in held if isinstance(held, list) else [held]:
                if copied := _COPIED.get((type(part).__module__, type(part).__name__)):
                    known[id(part)] = copied(part)
        return copy.deepcopy(asked, known)
    except Exception as error:  # whatever its state raises at being copied
        raise RefusedCallError(
            f"`logits_processor` has a {type(asked).__name__} that cannot be copied ({error!r}), "
            "and with `candidate_generator` each row needs its own. Let it be copied by "
            "`copy.deepcopy`, or pass one prompt at a time."
        ) from error
