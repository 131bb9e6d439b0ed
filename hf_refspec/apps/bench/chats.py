"""Reads prompts and recorded chats from files of rows, in the layouts that are common."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from transformers import BatchEncoding, PreTrainedTokenizerBase

from ...corpus.rows import ROWS, messages_of, read_rows, with_texts
from ...messages import counted
from ..shared.prompts import Message, assistant, chat_inputs, system, text_inputs, user

logger = logging.getLogger("hf_refspec")

# The columns with prompts, and with recorded answers; the first that a row has counts.
PROMPTS = ("turns", "messages", "prompt", "question", "text")
ANSWERS = ("reference", "answer", "response", "completion")


@dataclass(frozen=True)
class Chat:
    """A user's turns and recorded answers; or, if `is_text`, one text for a model to continue."""

    turns: list[str]
    answers: list[str]
    system: str = ""
    category: str = ""
    is_text: bool = False
    place: str = field(default="", compare=False)  # the file and the row

    def until(self, turn: int, answers: list[str]) -> list[Message]:
        """The messages up to a turn, with these answers to the earlier ones."""
        messages = [system(self.system)] if self.system else []
        for asked, answer in zip(self.turns[:turn], answers, strict=False):
            messages += [user(asked), assistant(answer)]
        return [*messages, user(self.turns[turn])]

    def inputs(
        self, tokenizer: PreTrainedTokenizerBase, turn: int, answers: list[str]
    ) -> BatchEncoding:
        """These messages, or the text, as ids and mask `(1, n)`."""
        if self.is_text:
            return text_inputs(tokenizer, self.turns[turn])
        try:
            return chat_inputs(tokenizer, self.until(turn, answers))
        except ValueError as error:
            raise ValueError(f"{self.place}: {error}") from error


def read_chats(path: Path) -> list[Chat]:
    """The chats of a file of rows, by default JSON lines; skips and counts rows without a text."""
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
            chats.append(_chat(row, column, place))
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
    """The first chats that the chat template takes; skips, names and counts those that it refuses.
    Raises a ValueError if none is left."""
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
            logger.warning("%s; skipped", error)
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
