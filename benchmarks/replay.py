"""Replay: the MAT of a drafter on recorded answers.

A logits processor forces a tiny random model to generate each recorded answer, by the same
`generate` that users call. MAT depends only on the text, so that the figure holds for any target
model that would have written it. LLMA's paper measures in the same way (arXiv 2304.04487).
"""

from __future__ import annotations

from collections.abc import Iterable
from time import perf_counter
from typing import Literal

import numpy as np
import torch
from transformers import LlamaForCausalLM, LogitsProcessorList, PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator

from hf_refspec.apps.bench.forced_text import ForcedText
from hf_refspec.apps.bench.models import random_model
from hf_refspec.apps.bench.suites import RecordedAnswer
from hf_refspec.drafting.candidates import CandidateChain
from hf_refspec.drafting.drafter import Drafter
from hf_refspec.drafting.observation import Observation
from hf_refspec.drafting.stats import SpeculationStats
from hf_refspec.drafting.tree import DraftTree
from hf_refspec.generation.speculate import speculate


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


def walk(
    answers: Iterable[RecordedAnswer], drafter: Drafter, vocab_size: int, max_draft_tokens: int
) -> SpeculationStats:
    """As [`replay`], without a model: for drafters that learn from tokens alone."""
    stats = SpeculationStats()
    for answer in answers:
        drafter.begin(np.array(answer.prompt_ids), vocab_size)
        left = np.array(answer.answer_ids)
        draft, accepted = DraftTree.empty(), 0
        while len(left):
            stats.record_rows([(len(draft), accepted)])
            drafter.observe(Observation(left[: accepted + 1], draft))
            left = left[accepted + 1 :]
            began = perf_counter()
            draft = drafter.draft(max_draft_tokens)
            stats.drafting_seconds += perf_counter() - began
            accepted = min(_accepted(draft, left), max(len(left) - 1, 0))
    return stats


def _accepted(draft: DraftTree, tokens: np.ndarray) -> int:
    """How many tokens of a text a draft has below its root."""
    node, accepted = -1, 0
    nodes = zip(draft.parents.tolist(), draft.tokens.tolist(), strict=True)
    for index, (parent, token) in enumerate(nodes):
        if accepted < len(tokens) and parent == node and token == tokens[accepted]:
            node, accepted = index, accepted + 1
    return accepted
