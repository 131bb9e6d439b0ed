"""Measures a model's answers with and without drafts, or replays recorded answers."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from itertools import zip_longest
from operator import or_
from pathlib import Path
from time import perf_counter
from typing import Any, TypeAlias

import numpy as np
from tqdm import tqdm
from transformers import BatchEncoding, PreTrainedTokenizerBase

from ...corpus.rows import ROWS, messages_of, read_rows, with_texts
from ...corpus.untrusted import one_line
from ...drafting.auto import default_sources
from ...drafting.blend import Blend
from ...drafting.contract import Call, Drafter, Observation
from ...drafting.datastore_drafts import DatastoreDrafts
from ...drafting.reference_copy import ReferenceCopy
from ...drafting.session_drafts import SessionDrafts
from ...drafting.stats import DraftStats
from ...drafting.token_recycling import TokenRecycling
from ...drafting.tree import DraftTree
from ...messages import counted, did_you_mean
from ...store.datastore import Datastore
from ..shared.comparison import UNDRAFTED, Comparison, Decoded
from ..shared.loading import layers_of, load_assistant
from ..shared.prompts import Message, chat_inputs, chat_messages, text_inputs, tokens_left

LOOK_UP = "transformers' prompt look-up"
LOOK_UP_TOKENS = 10
BY_NAME: dict[str, Callable[[], Drafter]] = {
    "auto": lambda: Blend(default_sources()),
    "ReferenceCopy": ReferenceCopy,
    "SessionDrafts": SessionDrafts,
    "TokenRecycling": TokenRecycling,
    # as published, with --max-draft-tokens 18
    "LLMA": partial(ReferenceCopy, published=True, copy_length=18),
}
# Names with the folder or Hub id of a datastore or a model.
OF_A_NAME = ("DatastoreDrafts=STORE", "REST=STORE")
OF_MODELS = ("use_mtp", "assistant_model=MODEL")
New: TypeAlias = Callable[[Any], Drafter]  # creates a drafter for a target model, if one is loaded
logger = logging.getLogger("hf_refspec")
# The columns with prompts, and with recorded answers; the first that a row has counts.
PROMPTS = ("turns", "messages", "prompt", "question", "text")
ANSWERS = ("reference", "answer", "response", "completion")


def drafter_named(text: str, tokenizer: PreTrainedTokenizerBase) -> New:
    """A function that creates a drafter from a name, such as `auto | DatastoreDrafts=org/store`."""
    try:
        parts = [_part(part.strip(), tokenizer) for part in text.split("|")]
    except (OSError, ValueError) as error:
        raise ValueError(f"--drafters {text!r}: {one_line(error)}") from error
    return lambda model: reduce(or_, [part(model) for part in parts])


def _part(text: str, tokenizer: PreTrainedTokenizerBase) -> New:
    name, _, value = text.partition("=")
    if text == "use_mtp":
        return layers_of
    if value and name == "assistant_model":
        return load_assistant(value)
    if value and name in ("DatastoreDrafts", "REST"):
        store = Datastore.from_pretrained(value, tokenizer=tokenizer)
        return lambda _: DatastoreDrafts(store, published=name == "REST")
    if text not in BY_NAME:
        known = [*BY_NAME, *OF_A_NAME, *OF_MODELS]
        raise ValueError(
            f"{text!r} is none of {', '.join(known)}, nor several of them, as in "
            f'"ReferenceCopy | TokenRecycling"{did_you_mean(text, known)}'
        )
    return lambda _: BY_NAME[text]()


def asked(chats: list[Chat]) -> int:
    """The number of prompts."""
    return sum(len(chat.turns) for chat in chats)


def measure(
    comparison: Comparison,
    tokenizer: PreTrainedTokenizerBase,
    chats: list[Chat],
    max_new_tokens: int,
) -> None:
    """Answers each turn by all methods, after plain answers to earlier ones; shows progress."""
    print("first a short call by each method, which is not timed", file=sys.stderr, flush=True)
    comparison.warm_up()
    model = comparison.model
    methods = len(comparison.methods)
    bar = tqdm(total=methods * asked(chats), unit=" calls", mininterval=0)

    def show(name: str, call: Decoded) -> None:
        bar.set_description(f"{name}, {call.seconds:.1f} s", refresh=False)
        bar.update()

    try:
        for chat in chats:
            answers: list[str] = []
            for turn in range(len(chat.turns)):
                about = ("a prompt", "it is left out")
                try:
                    inputs = chat.inputs(tokenizer, turn, answers)
                    left = tokens_left(inputs, model.config, *about, max_new_tokens)
                except ValueError as error:
                    bar.write(f"{chat.place}: {error}", file=sys.stderr)
                    bar.total -= methods * (len(chat.turns) - turn)
                    break
                call = comparison.ask(inputs.to(model.device), show, max_new_tokens=left)
                answers.append(tokenizer.decode(call.ids, skip_special_tokens=True))
    except KeyboardInterrupt:
        bar.write("stopped; these are the prompts so far", file=sys.stderr)
    bar.close()
    if not comparison.calls[UNDRAFTED]:
        raise ValueError("nothing was measured: all prompts were left out")


def recorded_answers(
    chats: list[Chat], tokenizer: PreTrainedTokenizerBase
) -> list[tuple[list[int], list[int]]]:
    """The ids of each prompt and of the recorded answer to it."""
    pairs = [
        (
            chat.inputs(tokenizer, turn, chat.answers)["input_ids"][0].tolist(),
            tokenizer(answer, add_special_tokens=False, verbose=False)["input_ids"],
        )
        for chat in chats
        for turn, answer in enumerate(chat.answers[: len(chat.turns)])
    ]
    return [(prompt, answer) for prompt, answer in pairs if answer]


def replay(
    answers: Iterable[tuple[list[int], list[int]]],
    drafter: Drafter,
    vocab_size: int,
    max_draft_tokens: int,
) -> DraftStats:
    """The statistics of `generate` if a model wrote these answers; the drafter sees tokens only."""
    stats = DraftStats()
    for prompt_ids, answer_ids in answers:
        drafter.begin(np.array(prompt_ids), vocab_size)
        left = np.array(answer_ids)
        draft = DraftTree.empty()
        accepted = 0
        while len(left):
            stats.record_rows([(len(draft), accepted)])
            drafter.observe(Observation(left[: accepted + 1], draft))
            left = left[accepted + 1 :]
            began = perf_counter()
            draft = drafter.draft(max_draft_tokens, Call())
            stats.add(drafting_seconds=perf_counter() - began)
            accepted = min(len(draft.along(left.tolist())), max(len(left) - 1, 0))
        drafter.end()
    return stats


@dataclass(frozen=True)
class Chat:
    """A user's turns and recorded answers; or, if `is_text`, one text for a model to continue."""

    turns: list[str]
    answers: list[str]
    system: str = ""
    category: str = ""
    is_text: bool = False
    place: str = field(default="a text", compare=False)  # the file and the row

    def until(self, turn: int, answers: list[str]) -> list[Message]:
        """The messages up to a turn, with these answers to the earlier ones."""
        return chat_messages(self.turns[: turn + 1], answers[:turn], self.system or None)

    def inputs(
        self, tokenizer: PreTrainedTokenizerBase, turn: int, answers: list[str]
    ) -> BatchEncoding:
        """These messages, or the text, as ids and mask `(1, n)`."""
        if self.is_text:
            return text_inputs(tokenizer, self.turns[turn])
        return chat_inputs(tokenizer, self.until(turn, answers))


def read_chats(path: Path, turns: int | None = None) -> list[Chat]:
    """The chats of a file of rows, by default JSON lines, or the first `turns` of each.

    Rows without a text are skipped and counted."""
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is not a file; name one of {', '.join(ROWS)}, also with .gz"
        )
    chats = []
    empty: Counter[str] = Counter()
    for number, row in read_rows(path):
        place = f"{path}, row {number}"
        columns = [name for name in PROMPTS if isinstance(row, dict) and name in row]
        if not columns:
            raise ValueError(f"{place} has none of the columns {', '.join(PROMPTS)}")
        column = next((name for name in columns if row[name]), None)
        if column is None:
            empty[columns[0]] += 1
        else:
            chat = _chat(row, column, place)
            chats.append(replace(chat, turns=chat.turns[:turns]))
    for column, rows in empty.items():
        skipped = counted(rows, "row")
        logger.warning("%s: skipped %s with an empty column %s", path, skipped, column)
    if not chats:
        raise ValueError(f"{path} has no prompts")
    return chats


def taking_turns(chats: list[Chat]) -> list[Chat]:
    """Chats in an order in which categories take turns, so that the first few cover many."""
    categories: dict[str, list[Chat]] = {}
    for chat in chats:
        categories.setdefault(chat.category, []).append(chat)
    rounds = zip_longest(*categories.values())
    return [chat for chosen in rounds for chat in chosen if chat is not None]


def rendered(
    chats: list[Chat], tokenizer: PreTrainedTokenizerBase, limit: int | None
) -> list[Chat]:
    """The first chats that the chat template takes, of which at least one must be left.

    Those that it refuses are skipped, named and counted."""
    taken: list[Chat] = []
    refused = 0
    for chat in chats:
        if len(taken) == limit:
            break
        answers = [*chat.answers, *["an answer"] * len(chat.turns)]
        try:
            chat.inputs(tokenizer, len(chat.turns) - 1, answers)
            taken.append(chat)
        except ValueError as error:
            logger.warning("%s: %s; skipped", chat.place, error)
            refused += 1
    if refused:
        logger.warning("skipped %s that the chat template refuses", counted(refused, "chat"))
    if not taken:
        raise ValueError(f"{chats[0].place}: the chat template refuses this chat and all others")
    return taken


def _chat(row: dict[str, Any], column: str, place: str) -> Chat:
    turns = _turns_of(row[column])
    answers = _turns_of(next((row[name] for name in ANSWERS if row.get(name)), None))
    opening = ""
    chat = None if all(isinstance(turn, str) for turn in turns) else messages_of(turns)
    if chat is not None:
        messages, skipped = with_texts(chat, place)
        if skipped:
            parts = counted(skipped, "message part")
            logger.warning("%s: skipped %s without text", place, parts)
        texts: dict[str, list[Any]] = {"system": [], "user": [], "assistant": []}
        for message in messages:
            role = message["role"]
            if role not in texts:
                raise ValueError(f"{place}: {column} has the role {role!r}; leave that message out")
            texts[role].append(message["content"])
        opening = "\n".join(map(str, texts["system"]))
        turns = texts["user"]
        answers = texts["assistant"] or answers
    if not turns or not all(isinstance(turn, str) for turn in turns):
        raise ValueError(f"{place}: {column} must be text, or a list of texts or messages")
    if not all(isinstance(answer, str) for answer in answers):
        answers = []
    return Chat(turns, answers, opening, str(row.get("category") or ""), place=place)


def _turns_of(value: Any) -> list[Any]:
    if isinstance(value, str):
        return [value]
    return value if isinstance(value, list) else []
