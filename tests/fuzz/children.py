"""Does things that may crash or hang in child processes, one after another.

What crashes or hangs a child is an outcome like any other, and the next child goes on after it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from huggingface_hub import constants

from .outcomes import Outcome

T = TypeVar("T")


@dataclass(frozen=True)
class Result(Generic[T]):
    """What became of one thing that was done.

    Attributes:
        item: What was to be done.
        rows (`tuple[str, str]`): What it is counted under: what it was done to, and what was done.
        done (`str`): The same more precisely.
        outcome ([`Outcome`]): How it ended.
    """

    item: T
    rows: tuple[str, str]
    done: str
    outcome: Outcome


# Tells, before it is dangerous, what is done: the two rows, and a text.
Say = Callable[[str, str, str], None]
Work = Callable[[T, Say], Outcome]


def in_children(
    items: Sequence[T], work: Work[T], seconds: float, log: Path
) -> Iterator[Result[T]]:
    """Does `work` with each item, as many as possible in one child.

    Args:
        items: What it is done with.
        work (`Callable`): Returns the outcome of an item, and says what is done once that is known.
        seconds (`float`): What takes longer hangs.
        log (`Path`): A file for what the children print.
    """
    left = list(items)
    while left:
        with _child(left, work, seconds, log) as lines:
            while left:
                rows, outcome = ["?", "?", "?"], None
                if (said := lines.next(seconds + 5)) is not None:
                    rows, outcome = said, lines.next(seconds)
                item = left.pop(0)
                if outcome is None:
                    outcome = ["hang" if lines.hung else "crash", _last_words(log)]
                ended = Outcome(*outcome)
                yield Result(item, (rows[0], rows[1]), rows[2], ended)
                if ended.name in ("hang", "crash"):
                    break


def _last_words(log: Path) -> str:
    """What a child has printed, without the lines of a traceback that are always the same."""
    lines = log.read_text("utf-8", "replace").splitlines()
    dull = ("tests/fuzz/", "runpy", "threading.py", "tqdm/", "Extension modules")
    return "\n".join(line for line in lines if not any(each in line for each in dull))


class _Lines:
    """The lines that a child writes.

    Attributes:
        hung (`bool`): Whether one did not come in time.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor, self.hung, self._read = descriptor, False, b""

    def next(self, seconds: float) -> list[str] | None:
        """What the next line says; `None` if the child has ended, or it takes longer."""
        while b"\n" not in self._read:
            if not select.select([self.descriptor], [], [], seconds)[0]:
                self.hung = True
                return None
            if not (part := os.read(self.descriptor, 1 << 16)):
                return None
            self._read += part
        line, self._read = self._read.split(b"\n", 1)
        said: list[str] = json.loads(line)
        return said


@contextlib.contextmanager
def _child(items: Sequence[T], work: Work[T], seconds: float, log: Path) -> Iterator[_Lines]:
    """A child that works; it is killed at the end."""
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(reading)
        _work(items, work, seconds, writing, log)
    os.close(writing)
    try:
        yield _Lines(reading)
    finally:
        os.close(reading)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


def _work(items: Sequence[T], work: Work[T], seconds: float, writing: int, log: Path) -> None:
    """What the child does; it does not return."""
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        faulthandler.enable(descriptor)
        constants.HF_HUB_OFFLINE = True  # a config can name a tokenizer that is nowhere
        with os.fdopen(writing, "w") as lines:

            def say(*what: str) -> None:
                print(json.dumps(what), file=lines, flush=True)

            for item in items:
                faulthandler.dump_traceback_later(seconds - 0.5, file=descriptor)
                outcome = work(item, say)
                faulthandler.cancel_dump_traceback_later()
                say(outcome.name, outcome.detail)
    except BaseException:
        print(traceback.format_exc(), file=sys.stderr, flush=True)
    finally:
        os._exit(0)


def table(results: Sequence[Result], row: int = 0) -> str:
    """Counts results by a row and by how they ended."""
    rows = sorted({result.rows[row] for result in results})
    ranks = {result.outcome.name: result.outcome.rank for result in results}
    names = sorted(ranks, key=lambda name: ranks[name])
    lines = [["", *names, "all"]]
    for each in [*rows, "all"]:
        of_row = [result for result in results if each in ("all", result.rows[row])]
        counts = [sum(result.outcome.name == name for result in of_row) for name in names]
        lines.append([each, *(f"{count:,}" for count in counts), f"{len(of_row):,}"])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            [line[0].ljust(widths[0])]
            + [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        )
        for line in lines
    )
