"""Kills every writer at its file operations, then looks at what is there, and writes again.

A child that writes is killed before the Nth call of a function in C that changes files, or after it
with half of what it wrote.
"""

from __future__ import annotations

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
from io import IOBase
from pathlib import Path
from typing import Any, NamedTuple

from hf_refspec.drafting.sessions.retrieval_cache import RetrievalCache
from hf_refspec.ralm.knn_datastore import KnnDatastore
from hf_refspec.store.datastore import Datastore
from hf_refspec.store.files import DatastoreError
from hf_refspec.store.folder_config import VERIFIED
from hf_refspec.store.sessions import DATABASE

from . import stores
from .children import Result, Say, in_children
from .formats import CONFIG, entries
from .outcomes import AFTER, BEFORE, BETWEEN, Outcome, difference, digest, snapshot
from .stores import ALONE, KINDS, copied

# Names of functions in C that change files or databases, but for methods of plain values.
OPERATIONS = {"open", "write", "pwrite", "writelines", "tofile", "truncate", "ftruncate", "fsync"}
OPERATIONS |= {"rename", "replace", "unlink", "remove", "mkdir", "rmdir", "link", "symlink"}
OPERATIONS |= {"chmod", "sendfile", "serialize_file", "execute", "executemany", "commit"}
VALUES = str, bytes, list, set, dict, deque

# Tells that a step of a writer's work must not be lost any more.
Acknowledge = Callable[[], object]


def nothing(*_: object) -> None:
    """Does nothing."""


@dataclass(frozen=True)
class Writer:
    """What writes a stored folder.

    `prepare` makes what is there before, at a path and beside it; `write` writes at the path, and
    acknowledges steps; `state` is what a user finds at the path, and `states` what a user finds
    after 0, 1, ... acknowledged steps, by default before and after all of it.
    """

    name: str
    prepare: Callable[[Path], object]
    write: Callable[[Path, Acknowledge], object]
    state: Callable[[Path], Any]
    is_new: bool = False  # whether it makes a new folder
    states: Callable[[], list[Any]] | None = None


class Kill(NamedTuple):
    """Where a writer is killed: before a file operation, by its number, or after half of it."""

    writer: Writer
    number: int
    operation: str
    torn: bool


class Whole(NamedTuple):
    """What a writer does if it is not killed: the states that a user may find, in order, the files
    when it has written, and the last state and the files when it has written once more."""

    states: list[Any]
    files: dict[str, Any]
    again: tuple[Any, dict[str, Any]]


def run_all(count: int, root: Path, writers: Sequence[Writer], seconds: float) -> Iterator[Result]:
    """Does so many of all kills, evenly spaced, in an empty folder `root`. One kill, and all that
    is done after it, may take so many seconds."""
    whole: dict[str, Whole] = {}
    kills: list[Kill] = []
    for writer in writers:
        (root / "before" / writer.name).mkdir(parents=True)
        writer.prepare(root / "before" / writer.name / "store")
        with copied(root / "before" / writer.name) as path:
            whole[writer.name], found = watched(writer, path)
        kills += found
    print(f"There are {len(kills):,} places to kill at.", flush=True)

    def attempt(kill: Kill, say: Say) -> Outcome:
        writer, number, operation, torn = kill
        call = operation + (", torn" if torn else "")
        say(writer.name, call, f"at {number}, {call}")
        with copied(root / "before" / writer.name) as path:
            acknowledged = killed(kill, path)
            try:
                return judged(writer, whole[writer.name], path, acknowledged)
            except Exception:
                return Outcome("another error", traceback.format_exc())

    count = min(count, len(kills))
    chosen = [kills[i * len(kills) // count] for i in range(count)]
    yield from in_children(chosen, attempt, seconds, root / "log")


def watched(writer: Writer, path: Path) -> tuple[Whole, list[Kill]]:
    """What a writer does if it is not killed, and where it can be."""
    before = writer.state(path)
    operations, status = traced(lambda: writer.write(path, nothing))
    if status != 0:
        raise RuntimeError(f"{writer.name} fails though nobody kills it")
    after, files = writer.state(path), snapshot(path.parent)
    again = after, files
    if not writer.is_new:
        writer.write(path, nothing)
        again = writer.state(path), snapshot(path.parent)
    kills = [
        Kill(writer, number, operation, torn)
        for number, operation in enumerate(operations)
        for torn in ([False, True] if operation == "write" else [False])
    ]
    return Whole(writer.states() if writer.states else [before, after], files, again), kills


def killed(kill: Kill, path: Path) -> int:
    """Kills the writer; returns how many steps it had acknowledged."""
    reading, writing = os.pipe()

    def work() -> None:
        # `writev` is no operation that is counted.
        kill.writer.write(path, lambda: os.writev(writing, [b"."]))

    traced(work, kill.number, kill.torn)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        return len(file.read())


def traced(
    work: Callable[[], object], stop: int | None = None, torn: bool = False
) -> tuple[list[str], int]:
    """Runs `work` in a child, which is killed before the operation with the number `stop`, or after
    it, if that is a write that is to be `torn`: then the second half is taken away. Returns the
    names of its operations, and the status that it ended with: 0 if all was well."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status, number, size = 1, -1, 0

        def at_call(frame: Any, event: str, called: Any) -> None:
            nonlocal number, size
            name, owner = getattr(called, "__name__", ""), getattr(called, "__self__", None)
            if name not in OPERATIONS or isinstance(owner, VALUES):
                return
            tears = torn and isinstance(owner, IOBase)
            if event == "c_call":
                number += 1
                if number == stop and not torn:
                    os.kill(os.getpid(), signal.SIGKILL)
                if tears:
                    size = flushed(owner)
                os.writev(writing, [f"{name}\n".encode()])
            elif event == "c_return" and number == stop and tears:
                os.truncate(owner.fileno(), (size + flushed(owner)) // 2)
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            threading.setprofile(at_call)
            sys.setprofile(at_call)
            work()
            status = 0
        finally:
            sys.setprofile(None)
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading) as file:
        operations = file.read().splitlines()
    return operations, os.waitpid(child, 0)[1]


def flushed(file: IOBase) -> int:
    """The size of a file when all that was written is in it."""
    file.flush()
    return os.fstat(file.fileno()).st_size


def judged(writer: Writer, whole: Whole, path: Path, acknowledged: int) -> Outcome:
    """What a kill has left, and whether the writer can do its work after it."""
    found = writer.state(path)
    if found not in whole.states:
        return Outcome("wrong results", f"neither as before nor as after: {found}")
    if found not in whole.states[acknowledged:]:
        return Outcome("lost in silence", f"{acknowledged} were acknowledged, found: {found}")
    done = found == whole.states[-1]
    if done and writer.is_new:
        shutil.rmtree(path)
    writer.write(path, nothing)
    twice = done and not writer.is_new
    expected, files = whole.again if twice else (whole.states[-1], whole.files)
    if writer.state(path) != expected:
        return Outcome("wrong results", f"after writing again: {writer.state(path)}")
    names = difference(snapshot(path.parent), files) if writer.states is None else unnamed(path)
    if names:
        return Outcome("left over", f"or not as it would have been: {sorted(names)}")
    return Outcome(AFTER if done else BEFORE if found == whole.states[0] else BETWEEN)


def unnamed(path: Path) -> set[str]:
    """What is in a folder that nobody has open, beside its database or what config.json names."""
    files = {file.name for file in path.iterdir()}
    if CONFIG not in files:
        return files - {DATABASE}
    config = json.loads((path / CONFIG).read_bytes())
    return files - {CONFIG, ".lock", VERIFIED} - {entry["name"] for entry in entries(config)}


def read_by(name: str) -> Callable[[Path], dict[str, str]]:
    """What the readers of a kind find at a path, or why not."""
    [kind] = [kind for kind in KINDS if kind.name == name]

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


def all_writers() -> list[Writer]:
    base, table = read_by("knowledge base"), read_by("recycling table")
    build_base, build_table = stores.build_knowledge_base, stores.build_recycling_table
    return [
        *datastore_writers(read_by("datastore")),
        Writer("knowledge base: build", nothing, lambda path, _: build_base(path), base, True),
        *knn_writers(read_by("kNN datastore")),
        Writer("recycling table: save", nothing, lambda path, _: build_table(path), table, True),
        cache_writer("new", 0, 10_000),
        cache_writer("opened again", 15, 10_000),
        cache_writer("forgetting", 12, 200),
    ]


def datastore_writers(state: Callable[[Path], Any]) -> Iterator[Writer]:
    known, texts = stores.tokenizer(), stores.texts(15)

    def build(path: Path, _: Any = None, shard_tokens: int = 300, **options: Any) -> None:
        options |= ALONE
        Datastore.build(texts[:12], known, path, shard_tokens=shard_tokens, **options)

    def deduplicate(path: Path, _: Any) -> None:
        try:
            Datastore(path).extend(texts[9:], known, deduplicate=True, **ALONE)
        except ValueError as error:  # the second time, all of it is there already
            if "no document that the datastore does not have" not in str(error):
                raise

    def compact(path: Path, _: Any) -> None:
        Datastore(path).compact(ngrams_per_order=11, progress=False)

    def other(path: Path) -> Path:
        return path.with_name("other")

    def build_other(path: Path) -> None:
        stores.build_datastore(other(path))

    def compact_other(path: Path, _: Any) -> None:
        Datastore(other(path)).compact(path, ngrams_per_order=11, progress=False)

    many = [[20 + number, 7, number, 7, number] for number in range(6)]

    def extend_often(path: Path, acknowledge: Acknowledge) -> None:
        store = Datastore(path)
        for document in many[store.documents - len(texts[:12]) :]:
            store = store.extend([document], known, **ALONE)
            acknowledge()

    def states_of_many() -> list[Any]:
        with tempfile.TemporaryDirectory() as folder:
            build(path := Path(folder) / "store")
            found = [state(path)]
            extend_often(path, lambda: found.append(state(path)))
        return found

    both = stores.build_datastore
    written: dict[str, tuple[Any, Any]] = {
        "extend": (both, lambda path, _: Datastore(path).extend(texts[12:], known, **ALONE)),
        "extend by what is new": (build, deduplicate),
        "merge": (both, lambda path, _: Datastore(path).merge(**ALONE)),
        "compact": (build, compact),
        "compact again": (both, compact),
    }
    made: dict[str, tuple[Any, Any]] = {
        "build": (nothing, build),
        "compact elsewhere": (build_other, compact_other),
        "save": (build_other, lambda path, _: Datastore(other(path)).save_pretrained(path)),
    }
    for name, how in written.items():
        yield Writer(f"datastore: {name}", *how, state)
    for name, how in made.items():
        yield Writer(f"datastore: {name}", *how, state, is_new=True)
    yield Writer("datastore: extend often", build, extend_often, state, states=states_of_many)


def knn_writers(state: Callable[[Path], Any]) -> Iterator[Writer]:
    model, known, texts = stores.model(), stores.tokenizer(), stores.texts(24)

    def build(path: Path, _: Any = None) -> None:
        KnnDatastore.build(model, known, texts, path, pq_index=True, progress=False)

    yield Writer("kNN datastore: build", nothing, build, state, is_new=True)


def cache_writer(name: str, begun: int, most_tokens: int) -> Writer:
    """What remembers calls in a cache of so many tokens, in which some are remembered already."""
    # Each is another one, so that the last one that is remembered tells how many there were.
    calls = [
        (stores.token_ids(f"call {number} of"), stores.token_ids(f" the calls: {number * number}"))
        for number in range(24)
    ]
    found_of = [[prompt.tolist(), output.tolist()] for prompt, output in calls]

    def add(path: Path, acknowledge: Acknowledge, end: int = len(calls)) -> None:
        cache = stores.opened_cache(path, max_tokens=most_tokens)
        found = stores.remembered(cache)
        for call in calls[found_of.index(found[-1]) + 1 if found else 0 : end]:
            cache.add(*call)
            acknowledge()

    def state(path: Path) -> Any:
        return stores.remembered(stores.opened_cache(path, max_tokens=most_tokens))

    def states() -> list[Any]:
        cache = RetrievalCache(max_tokens=most_tokens)
        found = [stores.remembered(cache)]
        for call in calls:
            cache.add(*call)
            found.append(stores.remembered(cache))
        return found[begun:]

    def prepare(path: Path) -> None:
        if begun:
            add(path, nothing, begun)

    return Writer(f"retrieval cache: {name}", prepare, add, state, states=states)
