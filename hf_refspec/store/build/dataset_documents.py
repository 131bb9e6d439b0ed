"""The documents of a `datasets` dataset: chats, texts, or prompts with their completions."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

logger = logging.getLogger("hf_refspec")

CHAT_COLUMNS = ("messages", "conversations", "conversation", "chat", "data")
TEXT_COLUMNS = ("text", "content")
PAIR = ("prompt", "completion")
# How ShareGPT and its relatives name who speaks.
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant"}
_SAMPLE = 100


class DatasetDocuments:
    """Iterates over the documents of a dataset.

    Chats are rendered by the tokenizer's chat template. Where it has none, or it refuses a chat,
    each turn is a document, as in the datastores of REST's authors (arXiv 2311.08252).

    Args:
        dataset (`datasets.Dataset` or `datasets.IterableDataset`): The rows.
        column (`str`, *optional*): The column to read; by default the first of: chats in one of
            `CHAT_COLUMNS`, one of `TEXT_COLUMNS`, a prompt and its completion.
        tokenizer (`PreTrainedTokenizerBase`): Renders chats.

    Raises:
        ValueError: If there is no such column, or none can be chosen safely.
    """

    def __init__(
        self, dataset: Any, column: str | None, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        sample = _first_rows(dataset)
        # Some streaming datasets have the names of their columns only in their rows.
        names = list(dataset.column_names or (sample[0] if sample else ()))
        if column is None:
            self.columns = _found(names, sample)
        elif names and column not in names:
            raise ValueError(f"column={column!r} is not in the dataset; it has {names}")
        else:
            self.columns = (column,)
        self._dataset, self._tokenizer = dataset, tokenizer
        logger.info("reading the column %s", " and ".join(map(repr, self.columns)))

    def __iter__(self) -> Iterator[Any]:
        refused = 0
        columns = list(self.columns)
        for row in self._dataset.select_columns(columns):
            value = _value(row, self.columns)
            messages = _messages(value)
            if messages is None:
                yield "" if value is None else _document(value)
                continue
            if self._tokenizer.chat_template is not None:
                try:
                    rendered = str(self._tokenizer.apply_chat_template(messages, tokenize=False))
                except (TemplateError, TypeError):  # the assistant begins, a turn is empty, ...
                    refused += 1
                else:
                    yield rendered
                    continue
            yield from (message["content"] or "" for message in messages)
        if refused:
            logger.warning(
                "the tokenizer's chat template refused %d chats; their turns are documents", refused
            )


def _first_rows(dataset: Any) -> list[dict[str, Any]]:
    """Some rows, without the columns whose values take time to decode, as images do."""
    if dataset.features is not None:
        features = dataset.features.items()
        plain = [name for name, feature in features if not hasattr(feature, "decode_example")]
        dataset = dataset.select_columns(plain)
    return list(islice(dataset, _SAMPLE))


def _found(names: list[str], sample: list[dict]) -> tuple[str, ...]:
    """The columns to read when none is named."""
    if not names:
        return (TEXT_COLUMNS[0],)  # There are no rows.
    for name in CHAT_COLUMNS:
        if any(_messages(row.get(name)) for row in sample):
            return (name,)
    for name in TEXT_COLUMNS:
        if name in names:
            return (name,)
    if set(PAIR) <= set(names):
        return PAIR
    raise ValueError(f"which column has the documents? Give column=, one of {names}")


def _value(row: Mapping[str, Any], columns: tuple[str, ...]) -> Any:
    """A row's column, or its prompt with the completion, both texts or both chats."""
    if len(columns) == 1:
        return row[columns[0]]
    prompt, completion = (row[name] for name in columns)
    if not prompt or not completion:
        return prompt or completion
    if type(prompt) is not type(completion):
        kinds = f"{type(prompt).__name__} and {type(completion).__name__}"
        raise ValueError(f"a prompt and its completion are a {kinds}; give column=, one of them")
    return prompt + completion


def _messages(value: Any) -> list[dict[str, Any]] | None:
    """A chat as messages with a role and a content, or `None` if the value is no chat. It may be a
    list of such messages, of ShareGPT's `from` and `value`, or of turns of user and assistant."""
    if not isinstance(value, list) or not value:
        return None
    if all(isinstance(turn, str) for turn in value):
        roles = ("user", "assistant")
        return [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(value)]
    if not all(isinstance(turn, Mapping) for turn in value):
        return None
    if all("role" in turn and "content" in turn for turn in value):
        return value
    if all("from" in turn and "value" in turn for turn in value):
        pairs = ((turn["from"], turn["value"]) for turn in value)
        return [{"role": _ROLES.get(who, who), "content": content} for who, content in pairs]
    return None


def _document(value: Any) -> Any:
    """A document that is no chat; refuses what looks like one."""
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        raise ValueError(
            f"the messages of a chat have {sorted(value[0])}, but need role and content, or from "
            "and value"
        )
    return value
