"""The terminal that the commands draw on."""

from __future__ import annotations

from typing import Any, NoReturn

from rich.console import Console


class Terminal(Console):
    """A rich console without automatic highlighting. A broken pipe reaches the caller: rich itself
    would exit with 1, which here means that ids differ."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, **options)

    def on_broken_pipe(self) -> NoReturn:
        raise  # the BrokenPipeError, which rich is handling
