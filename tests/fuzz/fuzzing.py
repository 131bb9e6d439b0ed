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
from .forging import Place
from .mutations import mutate
from .outcomes import Outcome, attack, results_of
from .stores import Kind

# More than any use of a small folder needs, beside what the process has mapped already.
MEMORY = 2 << 30


def run_all(
    numbers: Sequence[int], root: Path, kinds: Sequence[Kind], seconds: float
) -> Iterator[Result]:
    """Does the mutations of these numbers to folders of some kinds, in an empty folder `root`, and
    yields what becomes of each. Using a damaged folder may take so many seconds."""
    whole = {}
    for kind in kinds:
        kind.build(root / "whole" / kind.name)
        with copied(root, kind) as place:  # compiles what is compiled when first used
            whole[kind.name] = results_of({**kind.readers, **kind.writers}, place)

    def attempt(number: int, say: Say) -> Outcome:
        limit_memory()
        kind = kinds[number % len(kinds)]
        with copied(root, kind) as place:
            say(kind.name, *mutate(place, random.Random(number)))
            return attack(kind.readers, kind.writers, place, whole[kind.name])

    yield from in_children(numbers, attempt, seconds, root / "log")


@contextlib.contextmanager
def copied(root: Path, kind: Kind) -> Iterator[Place]:
    """A copy of the undamaged folder, with what is around it."""
    new = Path(tempfile.mkdtemp(dir=root))
    try:
        shutil.copytree(root / "whole" / kind.name, new / "store")
        yield Place.around(new)
    finally:
        shutil.rmtree(new)


def limit_memory() -> None:
    """Bounds the memory of this process, once."""
    if resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY:
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY, mapped + MEMORY))
