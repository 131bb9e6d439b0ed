"""Builds from what corpora should not be: endless lines, tiny documents, pipes, loops of links."""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from hf_refspec.retrieval.knowledge_base import KnowledgeBase
from hf_refspec.store.datastore import Datastore

from .children import Result, Say, in_children
from .forging import Place
from .outcomes import BUILT, REFUSED, Outcome, message_fault


def build(kind: str, source: Any, path: Path) -> None:
    if kind == "datastore":
        Datastore.build(source, word_tokenizer(), path, progress=False)
    else:
        KnowledgeBase.build(source, word_tokenizer(), None, path, progress=False)


class Source(NamedTuple):
    """What is built from: its name, what makes it in a folder and returns what is given to `build`,
    and how building from it may end."""

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


def all_sources(line_bytes: int, documents: int) -> Iterator[Source]:
    """All of them: a line of so many bytes, and so many documents."""

    def line(folder: Path) -> Path:
        block = " ".join(words(1 << 16)) + " "
        with open(folder / "line.txt", "w") as file:
            for _ in range(0, line_bytes, len(block)):
                file.write(block)
        os.truncate(folder / "line.txt", line_bytes)
        return folder / "line.txt"

    def tiny(folder: Path) -> Iterator[str]:
        yield from words(documents)

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
        (folder / "text.txt").write_text("a text")
        return pipe(folder).parent

    def linked_pipe(folder: Path) -> Path:
        (folder / "text.txt").symlink_to(pipe(folder))
        return folder / "text.txt"

    device = Path("/dev/zero")
    yield Source(f"a line of {line_bytes:,} bytes", line)
    yield Source(f"{documents:,} tiny documents", tiny)
    yield Source(f"{documents:,} empty documents", empty)
    yield Source("a folder with loops of links", looped)
    yield Source("a pipe", pipe, (REFUSED,))
    yield Source("a folder with a pipe", with_pipe, (BUILT, REFUSED))
    yield Source("a link to a pipe", linked_pipe, (REFUSED,))
    yield Source("a device", lambda folder: device, (REFUSED,))
    yield Source("a list with a device", lambda folder: [device], (REFUSED,))


def build_all(root: Path, line_bytes: int, documents: int, seconds: float) -> Iterator[Result]:
    """Builds each kind of folder from each source."""
    kinds = ("datastore", "knowledge base")
    items = [(kind, each) for each in all_sources(line_bytes, documents) for kind in kinds]
    word_tokenizer()  # once, for all children

    def attempt(item: tuple[str, Source], say: Say) -> Outcome:
        with tempfile.TemporaryDirectory(dir=root) as name:
            place = Place(Path(name) / "store", Path(name) / "corpus", Path(name) / "spare")
            return _attempt(*item, place, say)

    yield from in_children(items, attempt, seconds, root / "log")


def _attempt(kind: str, source: Source, place: Place, say: Say) -> Outcome:
    place.outside.mkdir()
    corpus = source.make(place.outside)
    say(source.name, kind, "built")
    begin, before = time.monotonic(), _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # measures the most memory anew
    try:
        build(kind, corpus, place.folder)
        outcome = Outcome(BUILT)
    except (ValueError, OSError) as error:
        fault = message_fault(str(error), place, needs_path=False)
        outcome = fault or Outcome(REFUSED, str(error))
    left = {file.name for file in place.folder.parent.iterdir()} - {"store", "corpus"}
    if left:
        return Outcome("left over", str(left))
    if outcome.name not in source.ends:
        return Outcome("wrong results", f"{outcome.name}, {outcome.detail}")
    took, more = time.monotonic() - begin, _resident("VmHWM") - before
    return Outcome(outcome.name, f"{took:.1f} s, {more >> 20:,} MB; {outcome.detail}")


def _resident(what: str) -> int:
    """The memory of this process now ("VmRSS"), or the most that it had ("VmHWM"), in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(what))
