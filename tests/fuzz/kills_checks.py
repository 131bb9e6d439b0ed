"""Writers that are killed leave what was, or what is to be, and the killer notices if not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from .kills import Killer, Writer, all_writers
from .syscalls import CALLS, trace

pytestmark = pytest.mark.skipif(not CALLS, reason="only Linux is traced, on x86-64 and aarch64")
WRITERS = all_writers()


@pytest.mark.parametrize("writer", WRITERS, ids=[writer.name for writer in WRITERS])
def test_a_killed_writer_loses_and_leaves_nothing(tmp_path, writer):
    killer = Killer(tmp_path, [writer])
    assert len(killer.kills) > 5
    results = list(killer.run(4))
    assert [f"{r.done}: {r.outcome}" for r in results if r.outcome.is_bad] == []


def content(path: Path) -> str:
    return path.read_text() if path.exists() else "nothing"


def write_twice(path: Path, _) -> None:
    path.write_text("first")
    path.write_text("second")


def replace(path: Path, _) -> None:
    new = path.with_suffix(".new")
    new.write_text("second")
    os.replace(new, path)


def replace_by_many(path: Path, _) -> None:
    new = path.with_suffix(f".{os.getpid()}")
    new.write_text("second")
    os.replace(new, path)


def promise(path: Path, acknowledge) -> None:
    acknowledge()
    path.write_text("second")


@pytest.mark.parametrize(
    "write, outcomes",
    [
        (replace, {"as before"}),
        (replace_by_many, {"as before", "left over"}),
        (write_twice, {"as before", "wrong results"}),
        (promise, {"lost in silence", "wrong results"}),
    ],
)
def test_a_writer_with_a_defect_is_found(tmp_path, write, outcomes):
    writer = Writer("writer", lambda path: None, write, content)
    assert {result.outcome.name for result in Killer(tmp_path, [writer]).run(100)} == outcomes


def test_the_operations_on_files_are_counted_whatever_does_them(tmp_path):
    def work() -> None:
        with open(tmp_path / "a", "wb", buffering=0) as file:
            file.write(b"123456")
        (tmp_path / "a").rename(tmp_path / "b")
        os.system(f"rm {tmp_path / 'b'}")
        (tmp_path.parent / "elsewhere").mkdir()

    assert trace(work, tmp_path).operations == ["open a", "write a", "rename b", "unlink b"]


@pytest.mark.parametrize("torn, left", [(False, b""), (True, b"123")])
def test_half_of_a_write_is_left_of_one_that_is_torn(tmp_path, torn, left):
    def work() -> None:
        with open(tmp_path / "a", "wb", buffering=0) as file:
            file.write(b"123456")

    assert trace(work, tmp_path, stop=1, torn=torn).killed
    assert (tmp_path / "a").read_bytes() == left


def test_half_of_a_write_into_the_middle_is_left_of_one_that_is_torn(tmp_path):
    (tmp_path / "a").write_bytes(b"abcdefghi")

    def work() -> None:
        file = os.open(tmp_path / "a", os.O_RDWR)
        os.pwrite(file, b"1234", 2)

    assert trace(work, tmp_path, stop=0, torn=True).killed
    assert (tmp_path / "a").read_bytes() == b"ab12efghi"


def test_what_fails_by_itself_is_told(tmp_path):
    def work() -> None:
        raise ValueError

    traced = trace(work, tmp_path)
    assert traced.status != 0 and not traced.killed
