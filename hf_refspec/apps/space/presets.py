"""Examples to begin with, one for each kind of work that drafts speed up."""

from __future__ import annotations

from typing import NamedTuple

from ..shared.scenes import FROM_THE_TEXT, NOTICE, TEMPERATURE


class Preset(NamedTuple):
    """What a button fills in: the first message, and a document that stands before it. The other
    messages are offered after the answers."""

    label: str
    messages: tuple[str, ...]
    document: str = ""


PRESETS = (
    Preset(
        "RAG",
        (
            f"{FROM_THE_TEXT} What is new at the library of Ashford?",
            "When is the library open on Saturdays?",
        ),
        NOTICE,
    ),
    Preset("Edit", ("Add docstrings to these functions.",), TEMPERATURE),
    Preset(
        "Chat",
        (
            "Write a SQL query that lists all customers from Berlin.",
            "Change it so that it lists all customers from Paris.",
        ),
    ),
    Preset(
        "Code",
        (
            "Write a Python class for a bank account with deposit, withdraw and balance.",
            "Write it again, with a method that transfers an amount to another account.",
        ),
    ),
)


def following(message: str) -> str:
    """The message that follows this one in its preset; empty if none does."""
    pairs = {one: next for each in PRESETS for one, next in zip(each.messages, each.messages[1:])}
    return pairs.get(message.strip(), "")
