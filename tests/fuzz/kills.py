"""Kills every writer at its file operations, then looks at what is there, and writes again.

A child that writes is killed before the Nth call of a function in C that changes files.
"""

import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hf_refspec.drafting.session_drafts import SessionDrafts
from hf_refspec.store.datastore import Datastore
from hf_refspec.store.files import DatastoreError
from hf_refspec.store.sessions import DATABASE

from . import stores
from .damage import CONFIG, entries
from .outcomes import AFTER, BEFORE, BETWEEN, Outcome, Result, digest, in_child
from .stores import ALONE, copied

# Names of functions in C that change files or databases, but for methods of plain values.
OPERATIONS = {"open", "write", "pwrite", "writelines", "tofile", "truncate", "ftruncate", "fsync"}
OPERATIONS |= {"rename", "replace", "unlink", "remove", "mkdir", "rmdir", "link", "symlink"}
OPERATIONS |= {"chmod", "sendfile", "serialize_file", "execute", "executemany", "commit"}
VALUES = str, bytes, list, set, dict, deque
_ACKNOWLEDGED = "acknowledged"

# Tells that a step of a writer's work must not be lost any more.
Acknowledge = Callable[[], object]


def nothing(*_: object) -> None:
    """Does nothing."""


@dataclass(frozen=True)
class Writer:
    """What writes a stored folder.

    `prepare` makes what is there before, at a path and beside it; `write` writes at the path, and
    acknowledges steps; `state` is what a user finds at the path.
    """

    name: str
    prepare: Callable[[Path], object]
    write: Callable[[Path, Acknowledge], object]
    state: Callable[[Path], Any]


class Whole(NamedTuple):
    """What a writer does if it is not killed: whether it makes a new folder, what a user finds
    before it, after each acknowledged step (which has to change that), at its end, and after
    writing once more, and the names of all files that belong to nothing."""

    is_new: bool
    states: list[Any]
    again: Any
    names: set[str]


def run_all(count: int, root: Path, writers: Sequence[Writer], seconds: float) -> Iterator[Result]:
    """Does `count` of all kills, evenly spaced, in an empty folder `root`. One kill and all that is
    done after it may take these `seconds`."""
    whole: dict[str, Whole] = {}
    kills: list[tuple[Writer, int, str]] = []
    for writer in writers:
        (before := root / "before" / writer.name).mkdir(parents=True)
        writer.prepare(before / "store")
        with copied(before) as path:
            operations, _, status = traced(writer, path)
            if status != 0:
                raise RuntimeError(f"{writer.name} fails though nobody kills it")
            kills += [(writer, number, name) for number, name in enumerate(operations)]
        with copied(before) as path:
            whole[writer.name] = watched(writer, path)

    def attempt(writer: Writer, number: int) -> Outcome:
        with copied(root / "before" / writer.name) as path:
            _, acknowledged, _ = traced(writer, path, stop=number)
            try:
                return judged(writer, whole[writer.name], path, acknowledged)
            except Exception:
                return Outcome("another error", traceback.format_exc())

    print(f"There are {len(kills):,} places to kill at.", flush=True)
    count = min(count, len(kills))
    for writer, number, name in (kills[i * len(kills) // count] for i in range(count)):
        outcome = in_child(lambda w=writer, n=number: attempt(w, n), seconds, root / "log")
        yield Result(f"{writer.name} at {number}, {name}", writer.name, outcome)


def watched(writer: Writer, path: Path) -> Whole:
    """What a writer does if it is not killed."""
    is_new, states = not path.exists(), [writer.state(path)]
    writer.write(path, lambda: states.append(writer.state(path)))
    states.append(writer.state(path))
    if not is_new:
        writer.write(path, nothing)
    return Whole(is_new, states, writer.state(path), unnamed(path))


def traced(writer: Writer, path: Path, stop: int | None = None) -> tuple[list[str], int, int]:
    """Writes in a child, which is killed before the operation with the number `stop`. Returns the
    names of its operations, how many steps it acknowledged, and the status that it ended with: 0 if
    all was well."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status, number = 1, -1

        def tell(name: str) -> None:
            os.writev(writing, [f"{name}\n".encode()])  # no operation that is counted

        def at_call(frame: Any, event: str, called: Any) -> None:
            nonlocal number
            name, owner = getattr(called, "__name__", ""), getattr(called, "__self__", None)
            if event == "c_call" and name in OPERATIONS and not isinstance(owner, VALUES):
                number += 1
                if number == stop:
                    os.kill(os.getpid(), signal.SIGKILL)
                tell(name)

        try:
            threading.setprofile(at_call)
            sys.setprofile(at_call)
            writer.write(path, lambda: tell(_ACKNOWLEDGED))
            status = 0
        finally:
            sys.setprofile(None)
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading) as file:
        told = file.read().splitlines()
    operations = [name for name in told if name != _ACKNOWLEDGED]
    return operations, len(told) - len(operations), os.waitpid(child, 0)[1]


def judged(writer: Writer, whole: Whole, path: Path, acknowledged: int) -> Outcome:
    """What a kill has left, and whether the writer can do its work after it."""
    found, last = writer.state(path), whole.states[-1]
    if found not in whole.states:
        return Outcome("wrong results", f"neither as before nor as after: {found}")
    if found in whole.states[:acknowledged]:
        return Outcome("lost in silence", f"{acknowledged} were acknowledged, found: {found}")
    if found == last and whole.is_new:
        shutil.rmtree(path)
    writer.write(path, nothing)
    if (again := writer.state(path)) != (whole.again if found == last else last):
        return Outcome("wrong results", f"after writing again: {again}")
    if names := unnamed(path) - whole.names:
        return Outcome("left over", str(sorted(names)))
    return Outcome(AFTER if found == last else BEFORE if found == whole.states[0] else BETWEEN)


def unnamed(path: Path) -> set[str]:
    """What is beside a folder, and in it beside its database or what config.json names."""
    known = {CONFIG, ".lock", DATABASE}
    files = list(path.iterdir()) if path.is_dir() else []
    if path / CONFIG in files:
        known |= {entry["name"] for entry in entries(json.loads((path / CONFIG).read_bytes()))}
    return {file.name for file in [*path.parent.iterdir(), *files]} - known


def read_by(kind: stores.Kind) -> Callable[[Path], dict[str, str]]:
    """What the readers of a kind find at a path, or why not."""

    def state(path: Path) -> dict[str, str]:
        found = {}
        for reader, use in kind.readers.items():
            with tempfile.TemporaryDirectory() as spare:
                try:
                    found[reader] = digest(use(path, Path(spare)))
                except (DatastoreError, FileNotFoundError) as error:
                    found[reader] = str(error).replace(str(path), "PATH")
        return found

    return state


def all_writers() -> Iterator[Writer]:
    state = read_by(stores.KINDS[0])
    for name, (prepare, write) in datastore_writers().items():
        yield Writer(f"datastore: {name}", prepare, write, state)
    for kind in stores.KINDS:
        if kind.name in ("knowledge base", "kNN datastore", "recycling table"):
            build = kind.build
            yield Writer(f"{kind.name}: build", nothing, lambda p, _, b=build: b(p), read_by(kind))
    yield cache_writer("new", 0, 10_000)
    yield cache_writer("opened again", 15, 10_000)
    yield cache_writer("forgetting", 12, 200)


def datastore_writers() -> dict[str, tuple[Callable[[Path], object], Callable[..., object]]]:
    known, texts = stores.tokenizer(), stores.texts(15)

    def build(path: Path, _: Any = None) -> None:
        Datastore.build(texts[:12], known, path, shard_tokens=300, **ALONE)

    def extend_often(path: Path, acknowledge: Acknowledge) -> None:
        store = Datastore(path)
        for number in range(store.documents - 12, 6):
            document = [20 + number, 7, number, 7, number]
            store = store.add([document], known, **ALONE)
            acknowledge()

    def build_named(path: Path) -> None:
        named = {str(number): text for number, text in enumerate(texts[:12])}
        Datastore.build(named, known, path, shard_tokens=300, **ALONE)

    def replace_often(path: Path, acknowledge: Acknowledge) -> None:
        store = Datastore(path)
        for number in range(6):
            if str(number) in store.names():  # each step replaces two documents and adds one
                changed: dict[str, Any] = {str(number): "", str(number + 6): [7, number, 7]}
                store.add({**changed, f"new {number}": [20 + number, 7, number]}, known, **ALONE)
                acknowledge()
        # Changes nothing, but deletes what a kill after the last step has left.
        store.add({"new 5": [25, 7, 5]}, known, **ALONE)

    def compact(path: Path, _: Any) -> None:
        Datastore(path).compact(ngrams_per_order=11, progress=False)

    def beside(path: Path) -> Path:
        return path.with_name("beside")

    def build_beside(path: Path) -> None:
        stores.build_datastore(beside(path))

    def compact_elsewhere(path: Path, _: Any) -> None:
        Datastore(beside(path)).compact(path, ngrams_per_order=11, progress=False)

    both = stores.build_datastore
    return {
        "build": (nothing, build),
        "extend": (both, lambda path, _: Datastore(path).add(texts[12:], known, **ALONE)),
        "extend often": (build, extend_often),
        "replace often": (build_named, replace_often),
        "merge": (both, lambda path, _: Datastore(path).merge(progress=False)),
        "compact": (both, compact),
        "compact elsewhere": (build_beside, compact_elsewhere),
        "save": (build_beside, lambda path, _: Datastore(beside(path)).save_pretrained(path)),
    }


def cache_writer(name: str, begun: int, most_tokens: int) -> Writer:
    """Remembers calls in a cache of `most_tokens`, in which some are remembered already."""
    # Each is another one, so that the last one that is remembered tells how many there were.
    calls = [
        (stores.token_ids(f"call {number} of"), stores.token_ids(f" the calls: {number * number}"))
        for number in range(24)
    ]
    found_of = [[prompt.tolist(), output.tolist()] for prompt, output in calls]

    def opened(path: Path) -> SessionDrafts:
        return SessionDrafts(stores.tokenizer(), path=path, max_tokens=most_tokens)

    def add(path: Path, acknowledge: Acknowledge, end: int = len(calls)) -> None:
        cache = opened(path)
        found = stores.remembered(cache)
        for call in calls[found_of.index(found[-1]) + 1 if found else 0 : end]:
            cache.add(*call)
            acknowledge()

    def prepare(path: Path) -> None:
        if begun:
            add(path, nothing, begun)

    return Writer(f"cache: {name}", prepare, add, lambda path: stores.remembered(opened(path)))
