"""Colours on a terminal, and the verdict on two lists of ids."""

from __future__ import annotations

import os
import sys

GREEN, RED, DIM, RESET = "\x1b[32m", "\x1b[31m", "\x1b[2m", "\x1b[0m"


def takes_color() -> bool:
    """Whether stdout is a terminal whose user has not asked for plain text."""
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ


def styled(text: str, style: str, color: bool) -> str:
    """The text in a style, if colours are used."""
    return f"{style}{text}{RESET}" if color and style and text else text


def verdict(plain_ids: list[int], other_ids: list[int]) -> str:
    """Whether ids are those of plain decoding, and if not, the first position that differs."""
    if plain_ids == other_ids:
        return "ids identical"
    pairs = zip(plain_ids, other_ids, strict=False)
    first = next((i for i, (one, other) in enumerate(pairs) if one != other), "the end")
    return f"IDS DIFFER from position {first}"
