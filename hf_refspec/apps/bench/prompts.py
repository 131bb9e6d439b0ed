"""Reads prompts and recorded chats from files of rows, in the layouts that are common."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import BatchEncoding, PreTrainedTokenizerBase

from ...store.build.chats import messages_of, with_texts
from ...store.build.rows import read_rows
from ..shared.prompts import Message, assistant, chat_inputs, system, text_inputs, user

logger = logging.getLogger("hf_refspec")

# The columns with prompts, and with recorded answers; the first that a row has counts.
PROMPTS = ("turns", "messages", "prompt", "question", "text")
ANSWERS = ("reference", "answer", "response", "completion")


@dataclass(frozen=True)
class Chat:
    """A user's turns, the answers to them that are recorded, and the system message or ""; or a
    single text, if `is_text`, for a model to go on from."""

    turns: list[str]
    answers: list[str]
    system: str = ""
    category: str = ""
    is_text: bool = False

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
        return chat_inputs(tokenizer, self.until(turn, answers))


def read_chats(path: Path) -> list[Chat]:
    """The chats of a file of rows (without an ending that says more, JSON lines); errors name the
    row."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is no file; name one of JSON lines or a Parquet file")
    chats = [_chat(row, f"{path}, row {number}") for number, row in read_rows(path)]
    if not chats:
        raise ValueError(f"{path} has no prompts")
    return chats


def taking_turns(chats: list[Chat]) -> list[Chat]:
    """Chats with their categories taking turns, so that the first few cover many of them."""
    counts: Counter[str] = Counter()

    def earlier(chat: Chat) -> int:
        counts[chat.category] += 1
        return counts[chat.category]

    return sorted(chats, key=earlier) if any(chat.category for chat in chats) else chats


def _chat(row: Any, where: str) -> Chat:
    columns = row if isinstance(row, dict) else {}
    column = next((name for name in PROMPTS if columns.get(name)), None)
    if column is None:
        raise ValueError(f"{where} has none of the columns {', '.join(PROMPTS)}")
    turns: Any = columns[column]
    opening, skipped = "", 0
    answers: Any = next((columns[name] for name in ANSWERS if columns.get(name)), [])
    turns, answers = ([each] if isinstance(each, str) else each for each in (turns, answers))
    turns, answers = (each if isinstance(each, list) else [] for each in (turns, answers))
    chat = None if all(isinstance(each, str) for each in turns) else messages_of(turns)
    if chat is not None:
        texts: dict[str, list[Any]] = {"system": [], "user": [], "assistant": []}
        messages, skipped = with_texts(chat, where)
        for each in messages:
            role = each["role"]
            if role not in texts:
                raise ValueError(f"{where}: {column} has the role {role!r}; leave that message out")
            texts[role].append(each["content"])
        opening = "\n".join(map(str, texts["system"]))
        turns, answers = texts["user"], texts["assistant"] or answers
    if not turns or not all(isinstance(each, str) for each in turns):
        raise ValueError(f"{where}: {column} must be text, or a list of texts or messages")
    if skipped:
        logger.warning("%s: %d parts of messages are no text, and were skipped", where, skipped)
    recorded = answers if all(isinstance(each, str) for each in answers) else []
    return Chat(turns, recorded, opening, str(columns.get("category") or ""))
