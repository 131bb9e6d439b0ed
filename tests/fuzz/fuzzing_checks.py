"""Damaged folders are refused or used, and the fuzzer notices if they are not."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from hf_refspec.store.files import DatastoreError

from . import stores
from .fuzzing import Fuzzer
from .outcomes import GOOD, OTHER, REFUSED, SAME
from .stores import Kind

COUNT = 240


@pytest.fixture(scope="module")
def fuzzer(tmp_path_factory):
    return Fuzzer(tmp_path_factory.mktemp("fuzz"))


@pytest.mark.parametrize("kind", range(len(stores.KINDS)), ids=[k.name for k in stores.KINDS])
def test_a_damaged_folder_is_used_or_refused_in_one_line_with_its_path(fuzzer, kind):
    results = list(fuzzer.run(range(kind, COUNT, len(stores.KINDS))))
    assert [f"{r.item}, {r.done}: {r.outcome}" for r in results if r.outcome.is_bad] == []
    # What is always refused when it is opened would test nothing behind that.
    ended = Counter(result.outcome.name for result in results)
    assert len(results) == COUNT // len(stores.KINDS)
    assert ended[SAME] > 0 and ended[OTHER] > 0 and ended[REFUSED] > 10
    assert set(ended) <= set(GOOD)


def test_a_mutation_is_always_the_same(fuzzer):
    first, again = (
        [(r.rows, r.done, r.outcome.name) for r in fuzzer.run([7, 30, 61])] for _ in range(2)
    )
    assert first == again


def broken(reader) -> Kind:
    """A kind with a defect, which shows whatever is done to the folder."""

    def build(path: Path) -> None:
        path.mkdir(parents=True)
        (path / "config.json").write_text('{"a": 1}')

    seen = []

    def use(folder: Path, spare: Path):
        # Undamaged, the first time, it is what it should be.
        if seen:
            reader(folder)
        seen.append(folder)

    return Kind("broken", build, {"read": use})


def hang(folder):
    time.sleep(60)


def abort(folder):
    os.kill(os.getpid(), signal.SIGABRT)


def escape(folder):
    raise DatastoreError(f"{folder} has \x1b[31m")


def two_lines(folder):
    raise DatastoreError(f"{folder} is\ndamaged")


def no_path(folder):
    raise DatastoreError("it is damaged")


def bare(folder):
    raise KeyError("size")


def too_much(folder):
    bytearray(1 << 40)


def write_into_it(folder):
    (folder / "new").touch()


def write_outside(folder):
    (folder.parent / "outside" / "victim").write_text("mine")


@pytest.mark.parametrize(
    "defect, name",
    [
        (hang, "hang"),
        (abort, "crash"),
        (escape, "bad message"),
        (two_lines, "bad message"),
        (no_path, "bad message"),
        (bare, "another error"),
        (too_much, "out of memory"),
        (write_into_it, "changed by reading"),
        (write_outside, "wrote outside"),
    ],
)
def test_a_defect_is_found(tmp_path, defect, name):
    fuzzer = Fuzzer(tmp_path, [broken(defect)], seconds=1)
    (result,) = fuzzer.run([0])
    assert result.outcome.name == name
