"""MAT of drafts on recorded answers, without any model."""

from __future__ import annotations

from collections.abc import Iterable
from time import perf_counter

import numpy as np
from transformers import PreTrainedTokenizerBase

from ...drafting.drafter import Drafter
from ...drafting.observation import Observation
from ...drafting.stats import SpeculationStats
from ...drafting.tree import DraftTree
from .measure import prompt_inputs
from .prompts import Chat


def recorded_answers(
    chats: list[Chat], tokenizer: PreTrainedTokenizerBase, turns: int | None = None
) -> list[tuple[list[int], list[int]]]:
    """The ids of each prompt and of the recorded answer to it."""
    pairs = [
        (
            prompt_inputs(tokenizer, chat.until(turn, chat.answers))["input_ids"][0].tolist(),
            tokenizer(answer, add_special_tokens=False, verbose=False)["input_ids"],
        )
        for chat in chats
        for turn, answer in enumerate(chat.answers[: len(chat.turns)][:turns])
    ]
    return [(prompt, answer) for prompt, answer in pairs if answer]


def replay(
    answers: Iterable[tuple[list[int], list[int]]],
    drafter: Drafter,
    vocab_size: int,
    max_draft_tokens: int,
) -> SpeculationStats:
    """Walks along recorded answers with a drafter that learns from tokens alone, and counts as
    `generate` would if a model wrote them."""
    stats = SpeculationStats()
    for prompt_ids, answer_ids in answers:
        drafter.begin(np.array(prompt_ids), vocab_size)
        left = np.array(answer_ids)
        draft, accepted = DraftTree.empty(), 0
        while len(left):
            stats.record_rows([(len(draft), accepted)])
            drafter.observe(Observation(left[: accepted + 1], draft))
            left = left[accepted + 1 :]
            began = perf_counter()
            draft = drafter.draft(max_draft_tokens)
            stats.drafting_seconds += perf_counter() - began
            accepted = min(len(draft.along(left.tolist())), max(len(left) - 1, 0))
    return stats
