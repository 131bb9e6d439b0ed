"""Killed writers lose and leave nothing, and defects are noticed; run by test_fuzzers.py."""

import math
import os
import signal
import time
from pathlib import Path

import pytest

from hf_refspec.store.files import DatastoreError

from . import attacks, kills
from .outcomes import Outcome, in_child
from .stores import Kind


def refuse(message):
    raise DatastoreError(message)


DEFECTS = {
    "hang": lambda folder: time.sleep(60),
    "crash": lambda folder: os.kill(os.getpid(), signal.SIGABRT),
    "bad message: control": lambda folder: refuse(f"{folder} has \x1b[31m"),
    "bad message: lines": lambda folder: refuse(f"{folder} is\ndamaged"),
    "bad message: no path": lambda folder: refuse("it is damaged"),
    "another error": lambda folder: {}["size"],
    "out of memory": lambda folder: bytearray(1 << 40),
    "changed by reading": lambda folder: (folder / "new").touch(),
    "wrote outside": lambda folder: (folder.parent / "outside" / "victim").write_text("mine"),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_reader_with_a_defect_is_found(tmp_path, name):
    def build(path: Path) -> None:
        path.mkdir(parents=True)
        (path / "config.json").write_text('{"a": 1}')

    seen = []

    def use(folder: Path, spare: Path) -> None:
        if seen:  # but not the first time, when it is undamaged
            DEFECTS[name](folder)
        seen.append(folder)

    kind = Kind("broken", build, {"read": use})
    (result,) = attacks.run_all([0], tmp_path, [kind], seconds=1)
    assert result.outcome.name == name.partition(":")[0]


def compute(seconds: float, pause: float, count: float = math.inf) -> Outcome:
    """Computes again and again, and waits between, as on a machine with other load."""
    done = 0
    while done < count:
        done += 1
        began = time.process_time()
        while time.process_time() - began < seconds:
            pass
        time.sleep(pause)
    return Outcome("equal")


@pytest.mark.parametrize(
    ("work", "name"),
    [
        (lambda: compute(0.04, 0.2, 12), "equal"),
        (lambda: compute(0.5, 0.0), "hang"),
        (lambda: time.sleep(60), "hang"),
    ],
)
def test_processor_time_tells_a_slow_child_from_one_that_hangs(tmp_path, work, name):
    outcome = in_child(work, 1, tmp_path / "log")
    assert outcome.name == name
    assert ("defects.py" in outcome.detail) == (name == "hang")


def test_killed_writers_lose_and_leave_nothing(tmp_path):
    results = [*kills.run_all(28, tmp_path, [*kills.all_writers()], 60)]
    assert len(results) == 28 and not [each for each in results if each.outcome.is_bad]


def write_twice(path: Path, _) -> None:
    path.write_text("first")
    path.write_text("second")


def replace_by_many(path: Path, _) -> None:
    new = path.with_suffix(f".{os.getpid()}")
    new.write_text("second")
    os.replace(new, path)


def promise(path: Path, acknowledge) -> None:
    acknowledge()
    write_twice(path, acknowledge)


@pytest.mark.parametrize(
    "write, outcomes",
    [
        (replace_by_many, {"as before", "left over"}),
        (write_twice, {"as before", "wrong results"}),
        (promise, {"lost in silence", "wrong results"}),
    ],
)
def test_a_writer_with_a_defect_is_found(tmp_path, write, outcomes):
    def content(path: Path) -> str:
        return path.read_text() if path.exists() else "nothing"

    writer = kills.Writer("writer", lambda path: path.write_text("old"), write, content)
    found = {result.outcome.name for result in kills.run_all(100, tmp_path, [writer], 60)}
    assert found == outcomes
