"""Numbers with their nouns, for messages."""

from __future__ import annotations


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """A number and its noun, such as "1 prompt" or "2,000 prompts"."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"
