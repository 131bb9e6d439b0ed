"""Builds from what corpora should not be: endless lines, tiny documents, pipes, loops of links."""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from hf_refspec.retrieval.knowledge_base import KnowledgeBase
from hf_refspec.store.datastore import Datastore

from .children import Result, Say, in_children
from .mutations import Place
from .outcomes import BUILT, REFUSED, Outcome, message_fault

BUILDERS: dict[str, Callable[[Any, Path], object]] = {
    "datastore": lambda source, path: Datastore.build(
        source, word_tokenizer(), path, progress=False
    ),
    "knowledge base": lambda source, path: KnowledgeBase.build(
        source, word_tokenizer(), None, path, progress=False
    ),
}


@dataclass(frozen=True)
class Source:
    """What is built from.

    Attributes:
        name (`str`): What it is.
        make (`Callable`): Makes it in a folder; returns what is given to `build`.
        ends (tuple of `str`): How building from it may end.
    """

    name: str
    make: Callable[[Path], Any]
    ends: tuple[str, ...] = (BUILT,)


@cache
def word_tokenizer() -> PreTrainedTokenizerFast:
    """One whose tokens are words."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=3000, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([" ".join(words(20_000))], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def words(count: int) -> list[str]:
    generator = random.Random(0)
    letters = "etaoinshrdlu"
    known = ["".join(generator.choices(letters, k=generator.randint(1, 8))) for _ in range(1000)]
    return generator.choices(known, k=count)


def sources(line_bytes: int, documents: int) -> list[Source]:
    """All of them: a line of so many bytes, and so many documents."""

    def line(folder: Path) -> Path:
        block = " ".join(words(1 << 16)) + " "
        with open(folder / "line.txt", "w") as file:
            for _ in range(0, line_bytes, len(block)):
                file.write(block)
        os.truncate(folder / "line.txt", line_bytes)
        return folder / "line.txt"

    def tiny(folder: Path) -> Iterator[str]:
        return (f"{word}" for word in words(documents))

    def empty(folder: Path) -> Iterator[str]:
        yield "one that is not"
        yield from ("" for _ in range(documents))

    def looped(folder: Path) -> Path:
        (folder / "below").mkdir()
        (folder / "below" / "text.txt").write_text("a text")
        (folder / "below" / "again").symlink_to(folder)
        (folder / "below" / "itself").symlink_to(folder / "below" / "itself")
        (folder / "one").symlink_to(folder / "two")
        (folder / "two").symlink_to(folder / "one")
        (folder / "nothing").symlink_to(folder / "nowhere")
        return folder

    def pipe(folder: Path) -> Path:
        os.mkfifo(folder / "pipe")
        return folder / "pipe"

    def with_pipe(folder: Path) -> Path:
        pipe(folder)
        (folder / "text.txt").write_text("a text")
        return folder

    def linked_pipe(folder: Path) -> Path:
        pipe(folder)
        (folder / "text.txt").symlink_to(folder / "pipe")
        return folder / "text.txt"

    either = (BUILT, REFUSED)
    return [
        Source(f"a line of {line_bytes:,} bytes", line),
        Source(f"{documents:,} tiny documents", tiny),
        Source(f"{documents:,} empty documents", empty),
        Source("a folder with loops of links", looped),
        Source("a pipe", pipe, (REFUSED,)),
        Source("a folder with a pipe", with_pipe, either),
        Source("a link to a pipe", linked_pipe, (REFUSED,)),
        Source("a device", lambda folder: Path("/dev/zero"), (REFUSED,)),
        Source("a list with a device", lambda folder: [Path("/dev/zero")], (REFUSED,)),
    ]


def build_all(
    root: Path, line_bytes: int, documents: int, seconds: float = 600
) -> Iterator[Result[tuple[str, Source]]]:
    """Builds each kind of folder from each source."""
    items = [(kind, each) for each in sources(line_bytes, documents) for kind in BUILDERS]
    word_tokenizer()  # once, for all children
    yield from in_children(items, lambda item, say: _build(root, *item, say), seconds, root / "log")


def _build(root: Path, kind: str, source: Source, say: Say) -> Outcome:
    with tempfile.TemporaryDirectory(dir=root) as name:
        place = Place(Path(name) / "store", Path(name) / "corpus", Path(name) / "spare")
        place.outside.mkdir()
        corpus = source.make(place.outside)
        say(source.name, kind, "")
        begin, before = time.monotonic(), _resident("VmRSS")
        _forget_peak()
        try:
            BUILDERS[kind](corpus, place.folder)
            outcome = Outcome(BUILT)
        except (ValueError, OSError) as error:
            outcome = message_fault(str(error), place, needs_path=False) or Outcome(
                REFUSED, str(error)
            )
        left = {file.name for file in Path(name).iterdir()} - {"store", "corpus"}
        if left:
            return Outcome("left over", str(left))
        if outcome.name not in source.ends:
            return Outcome("wrong results", f"{outcome.name}, {outcome.detail}")
        took, more = time.monotonic() - begin, _resident("VmHWM") - before
        return Outcome(outcome.name, f"{took:.1f} s, {more >> 20:,} MB; {outcome.detail}")


def _forget_peak() -> None:
    """Begins to measure the most memory that this process has anew."""
    Path("/proc/self/clear_refs").write_text("5")


def _resident(what: str) -> int:
    """The memory of this process now ("VmRSS"), or the most that it had ("VmHWM"), in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(what))
