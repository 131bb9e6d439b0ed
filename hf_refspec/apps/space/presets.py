"""Examples to begin with, one for each kind of work that drafts speed up."""

from __future__ import annotations

from dataclasses import dataclass

from ..shared.scenes import FROM_THE_TEXT, NOTICE, TEMPERATURE


@dataclass(frozen=True)
class Preset:
    """What a button fills in.

    Attributes:
        label (`str`): The button's.
        messages (`tuple[str, ...]`): The first message, and those that may follow its answer.
        document (`str`): Stands before the first message; may be empty.
    """

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
    for preset in PRESETS:
        for one, next in zip(preset.messages, preset.messages[1:], strict=False):
            if one == message.strip():
                return next
    return ""
