"""What a build shows on a terminal while it runs: one line for each phase."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, Task, TextColumn, TimeElapsedColumn
from rich.table import Column
from rich.text import Text

from .progress import BuildProgress


class BuildDisplay:
    """Documents and tokens that were read, and shards that were sorted and written.

    It is on stderr, or in a notebook; where that is a file or a pipe nothing is shown.

    Args:
        show (`bool`): Whether to show anything.
        total (`int`, *optional*): How many documents there are, if it is known.
        progress ([`BuildProgress`]): Where an earlier build was stopped.
    """

    def __init__(self, show: bool, total: int | None, progress: BuildProgress) -> None:
        shards = len(progress.shards)
        console = Console(stderr=True)
        drawn = console.is_jupyter or (sys.stderr.isatty() and not console.is_dumb_terminal)
        self._progress = Progress(
            SpinnerColumn(finished_text="✓"),
            TextColumn("{task.description}"),
            BarColumn(10),
            _Counts(),
            TimeElapsedColumn(table_column=Column(no_wrap=True, min_width=7)),
            console=console,
            disable=not (show and drawn),
        )
        add = self._progress.add_task
        tokens = sum(shard.tokens for shard in progress.shards)
        self._reading = add(
            "tokenizing",
            total=total,
            completed=progress.documents,
            unit="document",
            tokens=tokens,
            before=tokens,
        )
        # How many shards there will be is known once all is read.
        self._sorting, self._writing = (
            add(phase, total=None, completed=shards, unit="shard")
            for phase in ("sorting", "writing")
        )

    def __enter__(self) -> BuildDisplay:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def has_read(self, documents: int, tokens: int) -> None:
        """Counts documents that were read, and their tokens."""
        task = self._progress.tasks[self._reading]
        self._progress.update(
            self._reading, advance=documents, tokens=task.fields["tokens"] + tokens
        )

    def has_read_all(self, shards: int) -> None:
        """All documents were read; there will be so many shards."""
        documents = self._progress.tasks[self._reading].completed
        self._progress.update(self._reading, total=documents)
        for task in (self._sorting, self._writing):
            self._progress.update(task, total=shards)

    def has_sorted(self) -> None:
        """Counts a shard that was sorted."""
        self._progress.advance(self._sorting)

    def has_written(self) -> None:
        """Counts a shard that was written."""
        self._progress.advance(self._writing)


class _Counts(TextColumn):
    """How far a phase is, in numbers."""

    def __init__(self) -> None:
        super().__init__("")

    def render(self, task: Task) -> Text:
        text, count = f"{task.completed:,.0f}", task.completed
        if task.total is not None and not task.finished:
            text, count = f"{text} of {task.total:,.0f}", task.total
        text += f" {task.fields['unit']}{'s' * (count != 1)}"
        if "tokens" in task.fields:
            tokens, seconds = task.fields["tokens"], task.finished_time or task.elapsed
            text += f", {tokens:,} tokens"
            if seconds:
                text += f", {(tokens - task.fields['before']) / seconds:,.0f}/s"
        return Text(text)
