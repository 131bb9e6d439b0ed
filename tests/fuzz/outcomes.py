"""How an attack may end, and the child processes in which it may also crash or hang."""

import faulthandler
import hashlib
import multiprocessing
import os
import signal
import stat
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from huggingface_hub import constants

_FORK = multiprocessing.get_context("fork")
_LARGEST_COMPARED = 1 << 24
# The part of the time in which a process that computes is on a processor, however busy they are;
# and the seconds in which one writes where it is.
_WAITING, _TO_WRITE = 0.01, 0.5

# Of a damaged folder, of a writer that was killed, and of calls of `generate`.
SAME, OTHER, REFUSED, UNWRITABLE = "same results", "other results", "refused", "cannot be written"
BEFORE, BETWEEN, AFTER = "as before", "with what was acknowledged", "as after"
EQUAL, PLAIN_RAISED, TIE = "equal", "plain raised", "tie"
GOOD = (SAME, OTHER, UNWRITABLE, BEFORE, BETWEEN, AFTER, EQUAL, REFUSED, PLAIN_RAISED, TIE)
# What may not happen, the worst last.
DIFFERENT, CRASHED = "different", "crashed alone"
BAD = ("bad message", "another error", "out of memory", "wrong results", "lost in silence")
BAD += ("left over", "changed by reading", "wrote outside", DIFFERENT, CRASHED, "crash", "hang")
_ORDER = (*GOOD, *BAD)


class Outcome(NamedTuple):
    """How something ended, one of `GOOD` or `BAD`, and more about it for people."""

    name: str
    detail: str = ""

    @property
    def is_bad(self) -> bool:
        return self.name in BAD

    @staticmethod
    def worst(outcomes: Sequence["Outcome"]) -> "Outcome":
        return max(outcomes, key=lambda outcome: _ORDER.index(outcome.name))


class Result(NamedTuple):
    """What was done, to which kind of thing, and how that ended."""

    title: str
    kind: str
    outcome: Outcome


def table(results: Sequence[Result]) -> str:
    """How often what ended how, by kind."""
    counts = Counter((result.kind, result.outcome.name) for result in results)
    names = [name for name in _ORDER if any(name == outcome for _, outcome in counts)]
    lines = [["", *names]]
    for kind in sorted({result.kind for result in results}):
        lines.append([kind, *(f"{counts[kind, name]:,}" for name in names)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.rjust, line, widths)) for line in lines)


def in_child(work: Callable[[], Outcome], seconds: float, log: Path) -> Outcome:
    """Does work that may crash or hang in a child, whose last words are in the file `log`.

    It hangs if it takes more than these seconds of processor time, or hardly any of it in as many
    seconds: other load on the machine decides nothing."""
    receiver, sender = _FORK.Pipe(duplex=False)
    child = _FORK.Process(target=_do, args=(work, sender, log))
    child.start()
    sender.close()
    try:
        used = 0.0
        while not receiver.poll(seconds):
            before, used = used, _processor_seconds(child.pid)
            if used > seconds or used - before < _WAITING * seconds:
                os.kill(child.pid, signal.SIGUSR1)  # it writes down where it is
                time.sleep(_TO_WRITE)
                return Outcome("hang", log.read_text("utf-8", "replace"))
        outcome: Outcome = receiver.recv()
        return outcome
    except EOFError:
        return Outcome("crash", log.read_text("utf-8", "replace"))
    finally:
        receiver.close()
        child.kill()
        child.join()


def _processor_seconds(pid: int) -> float:
    """The processor time of a process and those that it has started."""
    used = 0.0
    with suppress(psutil.NoSuchProcess):
        for process in (started := psutil.Process(pid), *started.children(recursive=True)):
            used += sum(process.cpu_times()[:4])  # its own, and that of those that have ended
    return used


def _do(work: Callable[[], Outcome], sender: Connection, log: Path) -> None:
    """What the child does; it does not return."""
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        faulthandler.enable(descriptor)
        faulthandler.register(signal.SIGUSR1, descriptor)
        constants.HF_HUB_OFFLINE = True  # a config can name a tokenizer that is nowhere
        sender.send(work())
    except BaseException:
        os.write(descriptor, traceback.format_exc().encode())
    finally:
        os._exit(0)


def digest(result: Any) -> str:
    return hashlib.sha256(repr(result).encode()).hexdigest()


def snapshot(folder: Path, times: bool = False) -> dict[str, Any]:
    """All that is in a folder but its lock: of each entry what it is and what is in it."""
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
        if path.name != ".lock":
            found[str(path.relative_to(folder))] = (stat.S_IFMT(about.st_mode), content, when)
    return found


def difference(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    """Which names two snapshots differ in."""
    return {name for name, _ in before.items() ^ after.items()}
