"""Folders that are written whole or not at all, by one process at a time."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from textwrap import dedent

import pytest

from hf_refspec.store.files import DatastoreError
from hf_refspec.store.folder import LOCK, locked, new_folder, only_writer


def test_a_new_folder_is_there_whole_or_not_at_all(tmp_path):
    path = tmp_path / "store"
    with pytest.raises(KeyboardInterrupt), new_folder(path) as folder:
        (folder / "a").write_text("a")
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())
    place = tmp_path / ".store.hf_refspec-build"
    place.mkdir()
    (place / "old").write_text("of a process that was killed")
    place.with_name(f"{place.name}{LOCK}").write_text("")
    with new_folder(path) as folder:
        (folder / "a").write_text("a")
        assert not path.exists()
    assert [file.name for file in tmp_path.rglob("*")] == ["store", "a"]
    with pytest.raises(FileExistsError, match="exists; choose another path"), new_folder(path):
        raise AssertionError
    assert (path / "a").read_text() == "a"
    assert os.listdir(tmp_path) == ["store"]


def test_nothing_is_deleted_through_a_link(tmp_path):
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "a").write_text("mine")
    (tmp_path / ".store.hf_refspec-build").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic link"), new_folder(tmp_path / "store"):
        raise AssertionError
    assert (victim / "a").read_text() == "mine"


BUILDS = dedent("""
    import sys, time
    from pathlib import Path
    from hf_refspec.store.files import DatastoreError
    from hf_refspec.store.folder import new_folder

    root, name = Path(sys.argv[1]), sys.argv[2]
    sys.stdin.readline()
    made = 0
    for i in range(120):
        try:
            with new_folder(root / f"store{i // 4}") as folder:
                for part in range(5):
                    (folder / str(part)).write_text(name)
                if name == "fails" or i % 4 == 0:
                    raise RuntimeError
                made += 1
        except (DatastoreError, FileExistsError, RuntimeError):
            pass
    print(made)
""")


def test_processes_that_build_at_one_path_do_not_disturb_each_other(tmp_path):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    processes = [
        subprocess.Popen([sys.executable, "-c", BUILDS, str(tmp_path), name], text=True, **pipes)
        for name in ("one", "two", "three", "fails")
    ]
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    made = 0
    for process in processes:
        out, errors = process.communicate(timeout=600)
        assert process.returncode == 0, errors
        made += int(out)
    stores = os.listdir(tmp_path)
    assert 0 < made == len(stores) and {f"store{i}" for i in range(30)}.issuperset(stores)
    for store in stores:  # each is all of one process, and of one alone
        written = {file.name: file.read_text() for file in (tmp_path / store).iterdir()}
        assert len(set(written.values())) == 1 and sorted(written) == list("01234")


def test_one_writes_into_a_folder_at_a_time(tmp_path):
    with only_writer(tmp_path):
        message = f"{tmp_path} is being written by another process"
        with pytest.raises(DatastoreError, match=message), only_writer(tmp_path):
            raise AssertionError
        assert os.listdir(tmp_path) == [LOCK]
    assert not os.listdir(tmp_path)


# Locks


def test_a_folder_that_is_missing_is_not_made(tmp_path):
    with pytest.raises(FileNotFoundError, match="gone"), locked(tmp_path / "gone" / ".lock", ""):
        raise AssertionError
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no process is forked")
def test_a_forked_process_neither_releases_nor_keeps_it(tmp_path):
    path, (receiver, sender) = tmp_path / ".lock", os.pipe()
    with ExitStack() as stack:
        stack.enter_context(locked(path, ""))
        if (child := os.fork()) == 0:
            os.close(sender)
            stack.close()
            os.read(receiver, 1)  # until the other end is closed
            os._exit(0)
        os.close(receiver)
        with pytest.raises(DatastoreError, match="busy"), locked(path, "busy"):
            raise AssertionError
    with locked(path, "busy"):
        os.close(sender)
    os.waitpid(child, 0)


def link(path) -> None:
    path.with_name("victim").write_text("mine")
    path.symlink_to(path.with_name("victim"))


@pytest.mark.parametrize("put", [os.mkdir, os.mkfifo, link])
def test_what_is_no_file_is_no_lock(tmp_path, put):
    path = tmp_path / ".lock"
    put(path)
    refusal = f"{path} is in the place of a lock's file"
    with pytest.raises(DatastoreError, match=refusal), locked(path, ""):
        raise AssertionError
    assert path.exists()
