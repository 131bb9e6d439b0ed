"""How using a damaged folder may end, and how it may not."""

from __future__ import annotations

import hashlib
import logging
import re
import shutil
import stat
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_refspec.store.files import DatastoreError
from hf_refspec.store.folder_config import VERIFIED

from .formats import Place

SAME, OTHER = "same results", "other results"
REFUSED = "refused"
UNWRITABLE = "cannot be written"
# Of a writer that was killed: what a user finds.
BEFORE, BETWEEN, AFTER = "as before", "with what was acknowledged", "as after"
# Of calls of `generate`, plainly and drafted.
EQUAL, PLAIN_RAISED, TIE = "equal", "plain raised", "tie"
GOOD = (SAME, OTHER, UNWRITABLE, BEFORE, BETWEEN, AFTER, EQUAL, REFUSED, PLAIN_RAISED, TIE)

# What may not happen, the worst last.
DIFFERENT, CRASHED = "different", "crashed alone"
BAD = ("bad message", "another error", "out of memory", "wrong results", "lost in silence")
BAD += ("left over", "changed by reading", "wrote outside", DIFFERENT, CRASHED, "crash", "hang")
# Of terminals, and halves of surrogate pairs, which cannot be printed.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\ud800-\udfff]")
_LONGEST_MESSAGE = 2000
_LARGEST_COMPARED = 1 << 24


@dataclass(frozen=True)
class Outcome:
    """How something ended, one of `GOOD` or `BAD`, and more about it for people."""

    name: str
    detail: str = ""

    @property
    def is_bad(self) -> bool:
        return self.name in BAD

    @property
    def rank(self) -> int:
        """Its place in a table, the worst last."""
        return (*GOOD, *BAD).index(self.name)

    @staticmethod
    def worst(outcomes: list[Outcome]) -> Outcome:
        return max(outcomes, key=lambda outcome: outcome.rank)


def digest(result: Any) -> str:
    return hashlib.sha256(repr(result).encode()).hexdigest()


# A use gets the folder, and an empty one to write into. What it returns is compared.
Use = Callable[[Path, Path], Any]


def results_of(uses: Mapping[str, Use], place: Place) -> dict[str, str]:
    """What each use of an undamaged folder returns, as a digest."""
    found = {}
    for name, use in uses.items():
        empty(place.spare)
        found[name] = digest(use(place.folder, place.spare))
    return found


def attack(
    readers: Mapping[str, Use], writers: Mapping[str, Use], place: Place, whole: Mapping[str, str]
) -> Outcome:
    """Uses a damaged folder as a user would, and returns the worst outcome; `whole` has what the
    uses returned before the damage."""
    outcomes = []
    outside, content = snapshot(place.outside, times=True), snapshot(place.folder)
    for name, use in {**readers, **writers}.items():
        empty(place.spare)
        reads = name in readers
        with recorded_warnings() as warnings:
            outcome = used(use, place, whole[name], writes=not reads)
        for text in warnings:
            outcome = message_fault(text, place, needs_path=False) or outcome
        if outcome.name in (REFUSED, UNWRITABLE) and (left := sorted(place.spare.iterdir())):
            outcome = Outcome("left over", f"{left[0].name} in the folder to write into")
        now = snapshot(place.folder)
        if reads and (changed := difference(content, now)):
            outcome = Outcome("changed by reading", str(changed))
        content = now
        if difference(outside, snapshot(place.outside, times=True)):
            outcome = Outcome("wrote outside", f"{outcome.name}: {outcome.detail}")
        outcomes.append(Outcome(outcome.name, f"{name}: {outcome.detail}"))
    return Outcome.worst(outcomes)


def used(use: Use, place: Place, before: str, writes: bool) -> Outcome:
    """How one use ends."""
    try:
        return Outcome(SAME if digest(use(place.folder, place.spare)) == before else OTHER)
    except DatastoreError as error:
        return message_fault(str(error), place) or Outcome(REFUSED, str(error))
    except MemoryError:
        return Outcome("out of memory", traceback.format_exc())
    except AssertionError as error:
        return Outcome("wrong results", str(error))
    except BaseException as error:  # a panic of a library in Rust is no Exception
        documented = isinstance(error, OSError) and (writes or "cannot be loaded" in str(error))
        if documented:
            return message_fault(str(error), place) or Outcome(UNWRITABLE, str(error))
        return Outcome("another error", traceback.format_exc())


def message_fault(text: str, place: Place, needs_path: bool = True) -> Outcome | None:
    """What is wrong with a message."""
    if found := _CONTROL.search(text):
        return Outcome("bad message", f"has {found[0]!r}: {text!r}")
    if len(text) > _LONGEST_MESSAGE:
        return Outcome("bad message", f"has {len(text)} characters: {text[:200]}")
    if needs_path and str(place.folder.parent) not in text:
        return Outcome("bad message", f"names no path: {text}")
    return None


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


def snapshot(folder: Path, times: bool = False) -> dict[str, Any]:
    """All that is in a folder but its lock and the note of `verify`: of each entry what it is and
    what is in it."""
    found = {}
    for path in sorted(folder.rglob("*")):
        about = path.lstat()
        content: Any = None
        if stat.S_ISLNK(about.st_mode):
            content = str(path.readlink())
        elif stat.S_ISREG(about.st_mode):
            small = about.st_size < _LARGEST_COMPARED
            content = path.read_bytes() if small else about.st_size
        when = about.st_mtime_ns if times else 0
        if path.name not in (".lock", VERIFIED):
            found[str(path.relative_to(folder))] = (stat.S_IFMT(about.st_mode), content, when)
    return found


def difference(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    """Which names two snapshots differ in."""
    return {name for name, _ in before.items() ^ after.items()}


def empty(folder: Path) -> None:
    """Deletes all that is in a folder."""
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
