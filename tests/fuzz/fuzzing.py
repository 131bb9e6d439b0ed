"""Damages folders, one after another, and uses each as a user would."""

from __future__ import annotations

import contextlib
import random
import resource
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from .children import Result, Say, in_children
from .mutations import Place, mutate
from .outcomes import Outcome, Whole, attack
from .stores import KINDS, Kind

# More than any use of a small folder needs, beside what the process has mapped already.
MEMORY = 2 << 30


class Fuzzer:
    """Damages folders of some kinds.

    Args:
        root (`Path`): An empty folder for all of it.
        kinds (sequence of [`Kind`]): What is damaged.
        seconds (`float`): How long using a damaged folder may take.
    """

    def __init__(self, root: Path, kinds: Sequence[Kind] = KINDS, seconds: float = 20) -> None:
        self.root, self.kinds, self.seconds = root, kinds, seconds
        self.whole: dict[str, Whole] = {}
        for kind in kinds:
            kind.build(self._original(kind))
            with self._place(kind) as place:  # compiles what is compiled when first used
                self.whole[kind.name] = Whole.of(kind, place)

    def run(self, numbers: Sequence[int]) -> Iterator[Result[int]]:
        """Does the mutations of these numbers, and yields what becomes of each."""
        yield from in_children(numbers, self._attempt, self.seconds, self.root / "log")

    def _attempt(self, number: int, say: Say) -> Outcome:
        _limit_memory()
        kind = self.kinds[number % len(self.kinds)]
        with self._place(kind) as place:
            name, done = mutate(place, random.Random(number))
            say(kind.name, name, done)
            return Outcome.worst(attack(kind, place, self.whole[kind.name]))

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


def _limit_memory() -> None:
    """Bounds the memory of this process, once."""
    if resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY:
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY, mapped + MEMORY))
