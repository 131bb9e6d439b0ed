"""Does things that may crash or hang in child processes, one after another.

What crashes or hangs a child is an outcome like any other, and the next child goes on after it.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import constants

from .outcomes import Outcome

T = TypeVar("T")
# Says, before it becomes dangerous, what is done: to what, what, and the same more precisely.
Say = Callable[[str, str, str], None]
Work = Callable[[T, Say], Outcome]
_FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Result:
    """What became of one item: what was said of it, and the outcome."""

    item: Any
    said: tuple[str, str, str]
    outcome: Outcome


def in_children(items: Sequence[T], work: Work[T], seconds: float, log: Path) -> Iterator[Result]:
    """Does `work` with each item, as many as possible in one child. An item that takes longer than
    `seconds` hangs; what a child prints goes into the file `log`."""
    left = list(items)
    while left:
        receiver, sender = _FORK.Pipe(duplex=False)
        child = _FORK.Process(target=_work, args=(left, work, seconds, sender, log))
        child.start()
        sender.close()
        ended = ""
        try:
            while left and not ended:
                said = ("?", "?", "?")
                try:
                    said = _received(receiver, seconds + 5)
                    outcome = _received(receiver, seconds)
                except (TimeoutError, EOFError) as error:
                    ended = "hang" if isinstance(error, TimeoutError) else "crash"
                    outcome = Outcome(ended, _last_words(log))
                yield Result(left.pop(0), said, outcome)
        finally:
            receiver.close()
            os.kill(child.pid, signal.SIGKILL)
            child.join()


def _received(receiver: Connection, seconds: float) -> Any:
    if not receiver.poll(seconds):
        raise TimeoutError
    return receiver.recv()


def _last_words(log: Path) -> str:
    """What a child has printed, without the lines of a traceback that are always the same."""
    lines = log.read_text("utf-8", "replace").splitlines()
    dull = (
        "tests/fuzz/",
        "multiprocessing/",
        "runpy",
        "threading.py",
        "tqdm/",
        "Extension modules",
    )
    return "\n".join(line for line in lines if not any(each in line for each in dull))


def _work(items: Sequence[T], work: Work[T], seconds: float, sender: Connection, log: Path) -> None:
    """What the child does; it does not return."""
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        faulthandler.enable(descriptor)
        constants.HF_HUB_OFFLINE = True  # a config can name a tokenizer that is nowhere
        for item in items:
            faulthandler.dump_traceback_later(seconds - 0.5, file=descriptor)
            outcome = work(item, lambda *said: sender.send(said))
            faulthandler.cancel_dump_traceback_later()
            sender.send(outcome)
    except BaseException:
        print(traceback.format_exc(), file=sys.stderr, flush=True)
    finally:
        os._exit(0)


def table(results: Sequence[Result], row: int = 0) -> str:
    """Counts results by something that was said, and by how they ended."""
    counts = Counter((result.said[row], result.outcome.name) for result in results)
    counts.update(("all", result.outcome.name) for result in results)
    outcomes = {result.outcome.name: result.outcome for result in results}
    names = sorted(outcomes, key=lambda name: outcomes[name].rank)
    rows = [*sorted({result.said[row] for result in results}), "all"]
    lines = [["", *names, "all"]]
    for each in rows:
        found = [counts[each, name] for name in names]
        lines.append([each, *(f"{count:,}" for count in [*found, sum(found)])])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])])
        for line in lines
    )
