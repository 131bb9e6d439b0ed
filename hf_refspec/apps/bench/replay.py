"""Replay: the MAT of a drafter on recorded answers.

A logits processor forces a tiny random model to generate each recorded answer, by the same
`generate` that users call. MAT depends only on the text, so that the figure holds for any target
model that would have written it. LLMA's paper measures in the same way (arXiv 2304.04487).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from transformers import LlamaForCausalLM, LogitsProcessor, LogitsProcessorList, PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator

from ...drafting.candidates import CandidateChain
from ...drafting.drafter import Drafter
from ...drafting.stats import SpeculationStats
from ...generation.speculate import speculate
from .models import random_model
from .suites import RecordedAnswer


class ForcedText(LogitsProcessor):
    """Forces a text, `(length,)` ids of prompt and answer: its token scores highest at each place.

    The other tokens keep their scores: if they were forbidden, transformers' prompt look-up, which
    calls the logits processors before it drafts, would learn the text from them.

    The tokens that the model would have chosen by itself are recorded. They show whether passes
    over drafts compute the same as plain decoding; the forced text does not.
    """

    def __init__(self, ids: torch.Tensor) -> None:
        self.ids = ids
        # The last call for a position counts: a rejected draft causes another one.
        self._best: dict[int, torch.Tensor] = {}

    def __call__(self, input_ids: torch.LongTensor, scores: torch.Tensor) -> torch.Tensor:
        position = min(input_ids.shape[1], len(self.ids) - 1)
        if input_ids.shape[1] == position:
            self._best[position] = torch.argmax(scores[0])
        forced = scores.clone()
        forced[:, self.ids[position]] = torch.finfo(scores.dtype).max
        return forced

    def unforced(self) -> list[int]:
        """The tokens that the model would have chosen by itself."""
        return [int(self._best[position]) for position in sorted(self._best)]


def stand_in_model(vocab_size: int) -> LlamaForCausalLM:
    """A tiny model, for replays of MAT alone."""
    return random_model("tiny", vocab_size)


def replay(
    answers: Iterable[RecordedAnswer],
    drafter: CandidateGenerator,
    model: PreTrainedModel,
    max_draft_tokens: int | Literal["auto"] = "auto",
    verification: str = "auto",
) -> SpeculationStats:
    """Replays recorded answers, in this order, and sums up the drafter's statistics.

    The model is [`stand_in_model`] with at least the answers' vocabulary; the other arguments are
    those of `generate`.
    """
    if not isinstance(drafter, Drafter):
        drafter = CandidateChain(drafter)
    total = SpeculationStats()
    for answer in answers:
        ids = torch.tensor([answer.prompt_ids + answer.answer_ids])
        model.generate(
            ids[:, : len(answer.prompt_ids)],
            custom_generate=speculate,
            candidate_generator=drafter,
            max_draft_tokens=max_draft_tokens,
            verification=verification,
            max_new_tokens=len(answer.answer_ids),
            do_sample=False,
            eos_token_id=None,
            logits_processor=LogitsProcessorList([ForcedText(ids[0])]),
        )
        total += drafter.stats
    return total
