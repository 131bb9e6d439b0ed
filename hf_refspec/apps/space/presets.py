"""Examples to begin with, one for each kind of work that drafts speed up."""

from __future__ import annotations

from typing import NamedTuple

from ..shared.scenes import FROM_THE_TEXT, NOTICE, QUERIES, TEMPERATURE


class Preset(NamedTuple):
    """What a button fills in: the first message, and a document that stands before it. The other
    messages are offered after the answers."""

    label: str
    messages: tuple[str, ...]
    document: str = ""


_NEWS, _HOURS = "What is new at the library of Ashford?", "When is the library open on Saturdays?"
_ACCOUNT = "Write a Python class for a bank account with deposit, withdraw and balance."
_TRANSFER = "Write it again, with a method that transfers an amount to another account."
PRESETS = (
    Preset("RAG", (f"{FROM_THE_TEXT} {_NEWS}", _HOURS), NOTICE),
    Preset("Edit", ("Add docstrings to these functions.",), TEMPERATURE),
    Preset("Chat", QUERIES),
    Preset("Code", (_ACCOUNT, _TRANSFER)),
)


def following(message: str) -> str:
    """The message that follows this one in its preset; empty if none does."""
    for _, messages, _ in PRESETS:
        if message.strip() in messages[:-1]:
            return messages[messages.index(message.strip()) + 1]
    return ""
