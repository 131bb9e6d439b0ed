"""Kills every writer at its file operations, then looks at what is there, and writes again."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_refspec.drafting.sessions import memory
from hf_refspec.drafting.sessions.retrieval_cache import RetrievalCache
from hf_refspec.ralm.knn_datastore import KnnDatastore
from hf_refspec.store.datastore import Datastore
from hf_refspec.store.files import DatastoreError
from hf_refspec.store.sessions import DATABASE

from . import stores
from .children import Result, Say, in_children
from .forging import CONFIG, entries
from .outcomes import AFTER, BEFORE, BETWEEN, Outcome, difference, digest, snapshot
from .stores import KINDS, Kind
from .syscalls import WRITES, trace

# Tells that a step of a writer's work must not be lost any more.
Acknowledge = Callable[[], object]


@dataclass(frozen=True)
class Writer:
    """What writes a stored folder.

    Attributes:
        name (`str`): What it does.
        prepare (`Callable`): Makes what is there before, at a path and beside it.
        write (`Callable`): Writes at the path, and acknowledges steps.
        state (`Callable`): What a user finds at the path.
        is_new (`bool`): Whether it makes a new folder.
        states (`Callable`, *optional*): What a user finds after 0, 1, ... acknowledged steps; by
            default what there is before and after all of it.
    """

    name: str
    prepare: Callable[[Path], object]
    write: Callable[[Path, Acknowledge], object]
    state: Callable[[Path], Any]
    is_new: bool = False
    states: Callable[[], list[Any]] | None = None


@dataclass(frozen=True)
class Kill:
    """Where a writer is killed.

    Attributes:
        writer (`Writer`): Which one.
        number (`int`): Of the file operation that it is killed before, from 0 on.
        operation (`str`): What that is.
        torn (`bool`): Whether it is killed after half of it instead.
    """

    writer: Writer
    number: int
    operation: str
    torn: bool


@dataclass(frozen=True)
class Whole:
    """What a writer does if it is not killed.

    Attributes:
        states (`list`): What a user may find, in order: before, after each acknowledged step.
        files (`dict`): What there is when it has written.
        again (tuple of both): When it has written once more.
    """

    states: list[Any]
    files: dict[str, Any]
    again: tuple[Any, dict[str, Any]]


class Killer:
    """Kills writers.

    Args:
        root (`Path`): An empty folder for all of it.
        writers (sequence of `Writer`, *optional*): What is killed; by default all.
        seconds (`float`): How long one kill, and all that is done after it, may take.

    Attributes:
        kills (`list[Kill]`): All that there can be.
    """

    def __init__(
        self, root: Path, writers: Sequence[Writer] | None = None, seconds: float = 60
    ) -> None:
        self.root, self.seconds = root, seconds
        self.whole: dict[str, Whole] = {}
        self.kills: list[Kill] = []
        for writer in all_writers() if writers is None else writers:
            self._original(writer).mkdir(parents=True)
            writer.prepare(self._original(writer) / "store")
            with self._place(writer) as path:
                self._watch(writer, path)

    def run(self, count: int) -> Iterator[Result[Kill]]:
        """Does so many of the kills, evenly spaced, or all if there are fewer."""
        count = min(count, len(self.kills))
        chosen = [self.kills[i * len(self.kills) // count] for i in range(count)]
        yield from in_children(chosen, self._attempt, self.seconds, self.root / "log")

    def _watch(self, writer: Writer, path: Path) -> None:
        """Looks at what a writer does if it is not killed, and where it can be."""
        before = writer.state(path)
        traced = trace(lambda: writer.write(path, nothing), below=path.parent)
        if traced.status != 0:
            raise RuntimeError(f"{writer.name} fails though nobody kills it")
        after, files = writer.state(path), snapshot(path.parent)
        again = (after, files)
        if not writer.is_new:
            writer.write(path, nothing)
            again = (writer.state(path), snapshot(path.parent))
        states = [before, after] if writer.states is None else writer.states()
        self.whole[writer.name] = Whole(states, files, again)
        for number, operation in enumerate(traced.operations):
            self.kills.append(Kill(writer, number, operation, False))
            if operation.split()[0] in WRITES:
                self.kills.append(Kill(writer, number, operation, True))

    def _attempt(self, kill: Kill, say: Say) -> Outcome:
        call = kill.operation.split()[0]
        say(
            kill.writer.name,
            f"{call}, torn" if kill.torn else call,
            f"at {kill.number}, {kill.operation}{', torn' if kill.torn else ''}",
        )
        with self._place(kill.writer) as path:
            reading, writing = os.pipe()

            def work() -> None:
                kill.writer.write(path, lambda: os.write(writing, b"."))

            trace(work, path.parent, kill.number, kill.torn)
            os.close(writing)
            with os.fdopen(reading, "rb") as file:
                acknowledged = len(file.read())
            try:
                return self._look(kill.writer, path, acknowledged)
            except Exception:
                return Outcome("another error", traceback.format_exc())

    def _look(self, writer: Writer, path: Path, acknowledged: int) -> Outcome:
        """What a kill has left, and whether the writer can do its work after it."""
        whole, found = self.whole[writer.name], writer.state(path)
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
        names = difference(snapshot(path.parent), files)
        if writer.states is not None:
            names = unnamed(path)
        if names:
            return Outcome("left over", f"or not as it would have been: {sorted(names)}")
        return Outcome(AFTER if done else BEFORE if found == whole.states[0] else BETWEEN)

    def _original(self, writer: Writer) -> Path:
        return self.root / "before" / writer.name

    @contextmanager
    def _place(self, writer: Writer) -> Iterator[Path]:
        """A copy of what there is before."""
        with tempfile.TemporaryDirectory(dir=self.root) as folder:
            shutil.copytree(self._original(writer), folder, dirs_exist_ok=True)
            yield Path(folder) / "store"


def nothing(*_: object) -> None:
    """Does nothing."""


def unnamed(path: Path) -> set[str]:
    """What is in a folder that nobody has open, beside its database or what config.json names."""
    files = {file.name for file in path.iterdir()}
    if CONFIG not in files:
        return files - {DATABASE}
    named = {CONFIG, ".lock"} | {
        entry["name"] for entry in entries(json.loads((path / CONFIG).read_bytes()))
    }
    return files - named


def read_by(kind: Kind) -> Callable[[Path], dict[str, str]]:
    """What the readers of a kind find at a path, or why not."""

    def state(path: Path) -> dict[str, str]:
        found = {}
        for name, use in kind.readers.items():
            with tempfile.TemporaryDirectory() as spare:
                try:
                    found[name] = digest(use(path, Path(spare)))
                except (DatastoreError, FileNotFoundError) as error:
                    found[name] = str(error).replace(str(path), "PATH")
        return found

    return state


def all_writers() -> list[Writer]:
    """Each that there is."""
    kinds = {kind.name: kind for kind in KINDS}
    return [
        *datastore_writers(read_by(kinds["datastore"])),
        Writer(
            "knowledge base: build",
            nothing,
            lambda path, _: stores.build_knowledge_base(path),
            read_by(kinds["knowledge base"]),
            is_new=True,
        ),
        *knn_writers(read_by(kinds["kNN datastore"])),
        Writer(
            "recycling table: save",
            nothing,
            lambda path, _: stores.build_recycling_table(path),
            read_by(kinds["recycling table"]),
            is_new=True,
        ),
        *cache_writers(),
    ]


def datastore_writers(state: Callable[[Path], Any]) -> list[Writer]:
    options: dict[str, Any] = {"num_proc": 1, "progress": False}
    known, texts = stores.tokenizer(), stores.texts(15)

    def build(path: Path, *_: object) -> None:
        Datastore.build(texts[:12], known, path, shard_tokens=300, **options)

    def resume(path: Path, *_: object) -> None:
        Datastore.build(texts[:12], known, path, shard_tokens=150, resume=True, **options)

    def extend(path: Path, *_: object) -> None:
        Datastore(path).extend(texts[12:], known, **options)

    def deduplicate(path: Path, *_: object) -> None:
        with suppress_no_news():
            Datastore(path).extend(texts[9:], known, deduplicate=True, **options)

    def compact(path: Path, *_: object) -> None:
        Datastore(path).compact(ngrams_per_order=11, progress=False)

    def merge(path: Path, *_: object) -> None:
        Datastore(path).merge(num_proc=1, progress=False)

    def beside(path: Path) -> None:
        stores.build_datastore(path.with_name("other"))

    def compact_other(path: Path, *_: object) -> None:
        other = Datastore(path.with_name("other"))
        other.compact(path, ngrams_per_order=11, progress=False)

    def save_other(path: Path, *_: object) -> None:
        Datastore(path.with_name("other")).save_pretrained(path)

    many = [[20 + number, 7, number, 7, number] for number in range(6)]

    def extend_often(path: Path, acknowledge: Acknowledge) -> None:
        store = Datastore(path)
        for document in many[store.documents - len(texts[:12]) :]:
            store = store.extend([document], known, **options)
            acknowledge()

    def states_of_many() -> list[Any]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "store"
            build(path)
            found = [state(path)]
            extend_often(path, lambda: found.append(state(path)))
        return found

    both = stores.build_datastore
    return [
        Writer("datastore: build", nothing, build, state, is_new=True),
        Writer("datastore: build, resumed", nothing, resume, state, is_new=True),
        Writer("datastore: extend", both, extend, state),
        Writer("datastore: extend often", build, extend_often, state, states=states_of_many),
        Writer("datastore: extend by what is new", build, deduplicate, state),
        Writer("datastore: merge", both, merge, state),
        Writer("datastore: compact", build, compact, state),
        Writer("datastore: compact again", both, compact, state),
        Writer("datastore: compact elsewhere", beside, compact_other, state, is_new=True),
        Writer("datastore: save", beside, save_other, state, is_new=True),
    ]


@contextmanager
def suppress_no_news() -> Iterator[None]:
    """Lets an extension by what is there already, the second one, change nothing."""
    try:
        yield
    except ValueError as error:
        if "no document that the datastore does not have" not in str(error):
            raise


def knn_writers(state: Callable[[Path], Any]) -> list[Writer]:
    model, known, texts = stores.model(), stores.tokenizer(), stores.texts(24)

    def build(path: Path, *_: object) -> None:
        KnnDatastore.build(model, known, texts, path, progress=False)

    def add_pq_index(path: Path, *_: object) -> None:
        KnnDatastore(path).add_pq_index()

    def tune(path: Path, *_: object) -> None:
        KnnDatastore(path).tune(model, known, [text[::-1] for text in texts])

    return [
        Writer("kNN datastore: build", nothing, build, state, is_new=True),
        Writer("kNN datastore: PQ index", build, add_pq_index, state),
        Writer("kNN datastore: tune", build, tune, state),
    ]


def cache_writers() -> list[Writer]:
    # Each is another one, so that the last one that is remembered tells how many there were.
    calls = [
        (stores.token_ids(f"call {number} of"), stores.token_ids(f" the calls: {number * number}"))
        for number in range(24)
    ]
    found_of = [[prompt.tolist(), output.tolist()] for prompt, output in calls]

    def writer(name: str, begun: int, most_tokens: int) -> Writer:
        @contextmanager
        def opened(path: Path) -> Iterator[RetrievalCache]:
            memory.SEAL_TOKENS = stores.SEAL_TOKENS
            cache = RetrievalCache(stores.tokenizer(), max_tokens=most_tokens, path=path)
            try:
                yield cache
            finally:
                cache.close()

        def add(path: Path, end: int, acknowledge: Acknowledge) -> None:
            with opened(path) as cache:
                found = stores.remembered(cache)
                for call in calls[found_of.index(found[-1]) + 1 if found else 0 : end]:
                    cache.add(*call)
                    acknowledge()

        def state(path: Path) -> Any:
            with opened(path) as cache:
                return stores.remembered(cache)

        def states() -> list[Any]:
            cache = RetrievalCache(max_tokens=most_tokens)
            found = []
            for number, call in enumerate(calls, 1):
                if number > begun:
                    found.append(stores.remembered(cache))
                cache.add(*call)
            return [*found, stores.remembered(cache)]

        return Writer(
            name,
            lambda path: add(path, begun, nothing) if begun else None,
            lambda path, acknowledge: add(path, len(calls), acknowledge),
            state,
            states=states,
        )

    return [
        writer("retrieval cache: new", 0, 10_000),
        writer("retrieval cache: opened again", 15, 10_000),
        writer("retrieval cache: forgetting", 12, 200),
    ]
