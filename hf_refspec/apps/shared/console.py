"""The terminal that the commands draw on, and the verdict on two lists of ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from rich.console import Console


class Terminal(Console):
    """A rich console that colours nothing by itself, and leaves it to its caller to end quietly
    when the reader of a pipe is gone: rich would exit with the status that means that ids differed.

    Args:
        options: Of `rich.console.Console`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, **options)

    def on_broken_pipe(self) -> NoReturn:
        raise  # the BrokenPipeError, which rich is handling


def verdict(plain_ids: Sequence[int], other_ids: Sequence[int]) -> str:
    """Whether ids are those of plain decoding, and if not, the first position that differs."""
    if list(plain_ids) == list(other_ids):
        return "ids identical"
    pairs = zip(plain_ids, other_ids, strict=False)
    first = next((i for i, (one, other) in enumerate(pairs) if one != other), "the end")
    return f"IDS DIFFER from position {first}"
