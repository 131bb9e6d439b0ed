"""Damages stored folders, one after another, and uses each as a user would."""

import logging
import random
import re
import resource
import shutil
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hf_refspec.store.files import DatastoreError

from .damage import Place, damage
from .outcomes import (
    OTHER,
    REFUSED,
    SAME,
    UNWRITABLE,
    Outcome,
    Result,
    difference,
    digest,
    in_child,
    snapshot,
)
from .stores import Kind, Use, copied

# More than any use of a small folder needs, beside what the process has mapped already.
_MEMORY = 2 << 30
# Of terminals, and halves of surrogate pairs, which cannot be printed.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\ud800-\udfff]")
_LONGEST_MESSAGE = 2000


def run_all(
    numbers: Sequence[int], root: Path, kinds: Sequence[Kind], seconds: float
) -> Iterator[Result]:
    """Damages folders of some kinds, each by a number, in an empty folder `root`, and yields what
    becomes of each. Using a damaged folder may take this number of seconds."""
    whole = {}
    for kind in kinds:
        kind.build(root / "whole" / kind.name / "store")
        with copied(root / "whole" / kind.name) as path:  # compiles what is compiled at first use
            place = Place.around(path)
            uses = {**kind.readers, **kind.writers}.items()
            whole[kind.name] = {name: digest(use(path, emptied(place.spare))) for name, use in uses}

    def attempt(number: int, kind: Kind) -> Outcome:
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + _MEMORY, mapped + _MEMORY))
        with copied(root / "whole" / kind.name) as path:
            place = Place.around(path)
            done = damage(place, random.Random(number))
            print(ascii(done), flush=True)
            outcome = attack(kind, place, whole[kind.name])
            return Outcome(outcome.name, f"{done}\n    {outcome.detail}")

    for number in numbers:
        kind = kinds[number % len(kinds)]
        outcome = in_child(lambda n=number, k=kind: attempt(n, k), seconds, root / "log")
        yield Result(f"{number}, {kind.name}", kind.name, outcome)


def emptied(folder: Path) -> Path:
    """Deletes all that is in a folder."""
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    return folder


def attack(kind: Kind, place: Place, whole: dict[str, str]) -> Outcome:
    """Uses a damaged folder as a user would, and returns the worst outcome; `whole` has what the
    uses returned before the damage."""
    outcomes = []
    outside, content = snapshot(place.outside, times=True), snapshot(place.folder)
    for name, use in {**kind.readers, **kind.writers}.items():
        emptied(place.spare)
        reads = name in kind.readers
        with recorded_warnings() as warnings:
            outcome = used(use, place, whole[name], writes=not reads)
        for text in warnings:
            outcome = message_fault(text) or outcome
        if outcome.name in (REFUSED, UNWRITABLE) and (left := sorted(place.spare.iterdir())):
            outcome = Outcome("left over", f"{left[0].name} in the folder to write into")
        before, content = content, snapshot(place.folder)
        if reads and (changed := difference(before, content)):
            outcome = Outcome("changed by reading", str(changed))
        if difference(outside, snapshot(place.outside, times=True)):
            outcome = Outcome("wrote outside", f"{outcome.name}: {outcome.detail}")
        outcomes.append(Outcome(outcome.name, f"{name}: {outcome.detail}"))
    return Outcome.worst(outcomes)


def used(use: Use, place: Place, before: str, writes: bool) -> Outcome:
    """How one use ends."""
    path = str(place.folder.parent)
    try:
        return Outcome(SAME if digest(use(place.folder, place.spare)) == before else OTHER)
    except DatastoreError as error:
        return message_fault(str(error), path) or Outcome(REFUSED, str(error))
    except MemoryError:
        return Outcome("out of memory", traceback.format_exc())
    except AssertionError as error:
        return Outcome("wrong results", str(error))
    except BaseException as error:  # a panic of a library in Rust is no Exception
        if isinstance(error, OSError) and (writes or "cannot be loaded" in str(error)):
            return message_fault(str(error), path) or Outcome(UNWRITABLE, str(error))
        return Outcome("another error", traceback.format_exc())


def message_fault(text: str, path: str = "") -> Outcome | None:
    """What is wrong with a message, which has to name a path."""
    if found := _CONTROL.search(text):
        return Outcome("bad message", f"has {found[0]!r}: {text!r}")
    if len(text) > _LONGEST_MESSAGE:
        return Outcome("bad message", f"has {len(text)} characters: {text[:200]}")
    return None if path in text else Outcome("bad message", f"names no path: {text}")


@contextmanager
def recorded_warnings() -> Iterator[list[str]]:
    """What the package warns of meanwhile."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("hf_refspec")
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
