"""Lets a model answer prompts plainly and with drafts, by turns, or replays recorded answers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from time import perf_counter
from typing import Any, TypeAlias

import numpy as np
from tqdm import tqdm
from transformers import BatchEncoding, PreTrainedModel, PreTrainedTokenizerBase

from ...drafting.drafter import Drafter
from ...drafting.observation import Observation
from ...drafting.stats import SpeculationStats
from ...drafting.tree import DraftTree
from ...transformers_names import keeps_state_in_modules
from ..shared.comparison import PLAIN, Comparison, Methods
from ..shared.prompts import Message, chat_inputs, text_inputs, tokens_left
from .prompts import Chat

LOOK_UP, LOOK_UP_TOKENS = "transformers' prompt look-up", 10
NewDrafters: TypeAlias = Mapping[str, Callable[[], Drafter]]  # by name


def measure(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    chats: list[Chat],
    drafters: NewDrafters,
    budgets: Sequence[int | str] = ("auto",),
    turns: int | None = None,
    max_new_tokens: int = 256,
) -> Comparison:
    """Answers the first `turns` turns of chats plainly, by transformers' prompt look-up and with
    each of the drafters, each turn after plain decoding's answers to the earlier ones.

    Prompts that are too long are left out; ctrl-C keeps what was measured.
    """

    def methods() -> Methods:
        found: dict[str, dict[str, Any]] = {PLAIN: {}}
        if not keeps_state_in_modules(model):  # transformers has none for these
            found[LOOK_UP] = {"prompt_lookup_num_tokens": LOOK_UP_TOKENS}
        for name, new in drafters.items():
            for budget in budgets:
                label = name if budget == "auto" else f"{name}, {budget} draft tokens"
                found[label] = {"candidate_generator": new(), "max_draft_tokens": budget}
        return found

    comparison = Comparison(model, methods, do_sample=False)
    comparison.warm_up()
    try:
        for chat in tqdm(chats, "prompts", leave=False, disable=None):
            answers: list[str] = []
            for turn in range(len(chat.turns[:turns])):
                inputs = prompt_inputs(tokenizer, chat.until(turn, answers))
                try:
                    hint = "it is left out"
                    left = tokens_left(inputs, model.config, "a prompt", hint, max_new_tokens)
                except ValueError as error:
                    print(error, file=sys.stderr)
                    break
                call = comparison.ask(inputs.to(model.device), max_new_tokens=left)
                answers.append(tokenizer.decode(call.ids, skip_special_tokens=True))
    except KeyboardInterrupt:
        print("stopped; these are the prompts so far", file=sys.stderr)
    if not comparison.calls[PLAIN]:
        raise ValueError("nothing was measured: no prompt fits into the model's context")
    return comparison


def prompt_inputs(tokenizer: PreTrainedTokenizerBase, messages: list[Message]) -> BatchEncoding:
    """Messages in the chat template; without one as a text."""
    if tokenizer.chat_template is None:
        return text_inputs(tokenizer, "\n\n".join(each["content"] for each in messages))
    return chat_inputs(tokenizer, messages)


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
