"""The terminal that the commands draw on."""

from __future__ import annotations

from typing import Any, NoReturn

from rich.console import Console


class Terminal(Console):
    """A console without highlighting; rich's own would exit with 1 when a pipe breaks."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, **options)

    def on_broken_pipe(self) -> NoReturn:
        raise  # the BrokenPipeError, which rich is handling
