"""Damages folders, one after another, and counts how using them ends.

The work is done in child processes with bounds on memory and time: what crashes or hangs one is an
outcome like any other, and the next child goes on after it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import random
import resource
import select
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .mutations import Place, mutate
from .outcomes import BAD, Outcome, Whole, attack
from .stores import KINDS, Kind

# More than any use of a small folder needs, beside what the process has mapped already.
MEMORY = 2 << 30
SECONDS = 20.0


@dataclass(frozen=True)
class Result:
    """What became of one mutation.

    Attributes:
        number (`int`): Which one.
        kind (`str`): Of the folder.
        mutation (`str`): The name of what was done to it.
        done (`str`): What was done, in words.
        outcome ([`Outcome`]): The worst of all uses.
    """

    number: int
    kind: str
    mutation: str
    done: str
    outcome: Outcome


class Fuzzer:
    """Damages folders of some kinds.

    Args:
        root (`Path`): An empty folder for all of it.
        kinds (sequence of [`Kind`]): What is damaged.
        seconds (`float`): How long using a damaged folder may take.
    """

    def __init__(
        self, root: Path, kinds: Sequence[Kind] = KINDS, seconds: float = SECONDS
    ) -> None:
        self.root, self.kinds, self.seconds = root, kinds, seconds
        self.whole: dict[str, Whole] = {}
        for kind in kinds:
            kind.build(self._original(kind))
            with self._place(kind) as place:  # compiles what is compiled when first used
                self.whole[kind.name] = Whole.of(kind, place)

    def run(self, numbers: range) -> Iterator[Result]:
        """Does the mutations of these numbers, and yields what becomes of each."""
        left = numbers
        while left:
            log = self.root / "log"
            with _child(lambda file, todo=left: self._work(file, todo), log) as lines:
                for number in left:
                    doing = _next_line(lines, self.seconds + 5)
                    outcome = None if doing is None else _next_line(lines, self.seconds)
                    left = left[1:]
                    if outcome is not None:
                        yield Result(*doing, Outcome(*outcome))  # type: ignore[misc]
                        continue
                    kind, mutation, done = doing[1:] if doing else ("?", "?", "?")
                    hung = lines.hung  # else it has ended
                    detail = log.read_text(errors="replace")[-4000:]
                    yield Result(
                        number, kind, mutation, done, Outcome("hang" if hung else "crash", detail)
                    )
                    break

    def _work(self, lines: Any, numbers: range) -> None:
        """Does mutations, in a child: writes a line before each, and one after it."""
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY, mapped + MEMORY))
        for number in numbers:
            generator = random.Random(number)
            kind = self.kinds[number % len(self.kinds)]
            with self._place(kind) as place:
                mutation, done = mutate(place, generator)
                print(json.dumps([number, kind.name, mutation, done]), file=lines, flush=True)
                faulthandler.dump_traceback_later(self.seconds - 0.5)
                in_place = mutation == "bits" and ";" not in done and "forged" not in done
                outcomes = attack(kind, place, self.whole[kind.name], in_place)
                faulthandler.cancel_dump_traceback_later()
                worst = Outcome.worst(outcomes)
            print(json.dumps([worst.name, worst.detail]), file=lines, flush=True)

    def _original(self, kind: Kind) -> Path:
        return self.root / "whole" / kind.name

    @contextlib.contextmanager
    def _place(self, kind: Kind) -> Iterator[Place]:
        """A copy of the undamaged folder, with what is around it."""
        root = Path(tempfile.mkdtemp(dir=self.root))
        try:
            shutil.copytree(self._original(kind), root / "store")
            yield Place.made(root)
        finally:
            shutil.rmtree(root)


class _Lines:
    """The lines that a child writes.

    Attributes:
        hung (`bool`): Whether one did not come in time.
    """

    def __init__(self, descriptor: int) -> None:
        self._file, self.hung = os.fdopen(descriptor, "rb", buffering=0), False
        self._read = b""

    def next(self, seconds: float) -> bytes | None:
        """The next line; `None` if the child has ended, or it takes longer."""
        while b"\n" not in self._read:
            if not select.select([self._file], [], [], seconds)[0]:
                self.hung = True
                return None
            if not (part := self._file.read(1 << 16)):
                return None
            self._read += part
        line, self._read = self._read.split(b"\n", 1)
        return line

    def close(self) -> None:
        self._file.close()


def _next_line(lines: _Lines, seconds: float) -> list[Any] | None:
    line = lines.next(seconds)
    return None if line is None else json.loads(line)


@contextlib.contextmanager
def _child(work: Any, log: Path) -> Iterator[_Lines]:
    """Runs `work(file)` in a child, which is killed at the end; yields the lines that it writes.
    What it prints goes into `log`."""
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            os.close(reading)
            descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            faulthandler.enable(descriptor)
            with os.fdopen(writing, "w") as file:
                work(file)
        except BaseException:
            print(traceback.format_exc(), file=sys.stderr, flush=True)
        finally:
            os._exit(0)
    os.close(writing)
    lines = _Lines(reading)
    try:
        yield lines
    finally:
        lines.close()
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


def table(results: Sequence[Result], by: str = "kind") -> str:
    """Counts results by what they are of and how they ended."""
    rows = sorted({getattr(result, by) for result in results})
    columns = [each for each in _columns() if any(r.outcome.name == each for r in results)]
    lines = [f"{'':<18}" + "".join(f"{column:>24}" for column in columns) + f"{'all':>8}"]
    for row in [*rows, "all"]:
        of_row = [r for r in results if row in ("all", getattr(r, by))]
        counts = [sum(r.outcome.name == column for r in of_row) for column in columns]
        lines.append(
            f"{row:<18}" + "".join(f"{count:>24,}" for count in counts) + f"{len(of_row):>8,}"
        )
    return "\n".join(lines)


def _columns() -> tuple[str, ...]:
    from .outcomes import GOOD

    return (*GOOD, *BAD)
