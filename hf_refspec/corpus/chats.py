"""Chats in the layouts that are common, read as messages with a role and a text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

# The speakers' names in ShareGPT and its relatives.
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant"}


def messages_of(value: Any) -> list[dict[str, Any]] | None:
    """A chat as messages with a role and a content, or `None` if the value is no chat. It may be a
    list of such messages, of ShareGPT's `from` and `value`, or of turns of user and assistant."""
    value = _as_list(value)
    if not isinstance(value, list) or not value:
        return None
    if all(isinstance(turn, str) for turn in value):
        roles = ("user", "assistant")
        return [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(value)]
    for role, content in (("role", "content"), ("from", "value")):
        if all(isinstance(turn, Mapping) and {role, content} <= turn.keys() for turn in value):
            return [{**turn, "role": turn[role], "content": turn[content]} for turn in value]
    return None


def with_texts(messages: list[dict[str, Any]], place: str) -> tuple[list[dict[str, Any]], int]:
    """Messages whose content is a text or `None`, and how many parts of messages were no text."""
    plain = []
    skipped = 0
    for message in messages:
        role = message["role"]
        content = message["content"]
        if not isinstance(role, str):
            raise ValueError(f"{place}: the role of a message must be a text, but is {role!r:.80}")
        if content is not None:
            content, others = text_of(content, place)
            skipped += others
        plain.append({**message, "role": _ROLES.get(role, role), "content": content})
    return plain, skipped


def text_of(content: Any, place: str) -> tuple[str, int]:
    """The text of a message's content, and how many parts of it are no text, such as images."""
    content = _as_list(content)
    if isinstance(content, str):
        return content, 0
    if not isinstance(content, list) or not all(
        isinstance(part, str | Mapping) for part in content
    ):
        raise ValueError(
            f"{place}: the content of a message must be a text or a list of parts, but is "
            f"{content!r:.80}"
        )
    parts = [part if isinstance(part, str) else part.get("text") for part in content]
    texts = [part for part in parts if isinstance(part, str)]
    return "".join(texts), len(parts) - len(texts)


def _as_list(value: Any) -> Any:
    """A list, where pandas has an array."""
    return value.tolist() if isinstance(value, np.ndarray) else value
