"""Only one holds a lock, whatever happens to its file."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
from textwrap import dedent

import pytest

from hf_refspec.store.files import DatastoreError
from hf_refspec.store.folder import locked, release


def test_who_comes_second_is_refused(tmp_path):
    path = tmp_path / ".lock"
    lock = locked(path, "wait for it")
    with pytest.raises(DatastoreError, match="wait for it"):
        locked(path, "wait for it")
    release(lock)
    assert not path.exists()
    release(locked(path, ""))


def test_who_forgets_it_lets_go_of_it(tmp_path):
    lock = locked(tmp_path / ".lock", "")
    del lock
    lock = locked(tmp_path / ".lock", "it is held")
    release(lock)
    release(lock)  # once more does nothing


@pytest.mark.parametrize("held", [True, False], ids=["held", "free"])
def test_a_file_that_was_deleted_is_no_lock(tmp_path, monkeypatch, held):
    """The first lets go between the opening and the locking of the second, and a third comes."""
    path = tmp_path / ".lock"
    first, others = locked(path, ""), []

    def flock(descriptor, operation, original=fcntl.flock):
        monkeypatch.setattr(fcntl, "flock", original)
        release(first)
        if held:
            others.append(locked(path, ""))
        original(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    if held:
        with pytest.raises(DatastoreError, match="it is held"):
            locked(path, "it is held")
        release(others[0])
    else:
        second = locked(path, "")
        with pytest.raises(DatastoreError, match="it is held"):
            locked(path, "it is held")
        release(second)


def test_a_process_that_was_forked_does_not_keep_it(tmp_path):
    path = tmp_path / ".lock"
    lock = locked(path, "")
    receiver, sender = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(sender)
        os.read(receiver, 1)  # until the other end is closed
        os._exit(0)
    os.close(receiver)
    release(lock)
    release(locked(path, "it is held"))
    os.close(sender)
    os.waitpid(child, 0)


def test_a_folder_that_is_missing_is_not_made(tmp_path):
    with pytest.raises(FileNotFoundError, match="gone"):
        locked(tmp_path / "gone" / ".lock", "")
    assert not list(tmp_path.iterdir())


def test_the_lock_of_a_killed_process_is_free(tmp_path):
    path = tmp_path / ".lock"
    code = (
        "import sys; from pathlib import Path; from hf_refspec.store.folder import locked\n"
        "lock = locked(Path(sys.argv[1]), ''); print('held', flush=True); sys.stdin.read()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code, str(path)], **pipes) as process:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(DatastoreError, match="it is held"):
            locked(path, "it is held")
        process.kill()
    release(locked(path, "it is held"))


HOLDS = dedent("""
    import os, sys
    from pathlib import Path
    from hf_refspec.store.files import DatastoreError
    from hf_refspec.store.folder import locked, release

    path, inside, held = Path(sys.argv[1]), sys.argv[2], 0
    sys.stdin.readline()
    tries = 0
    while tries < 3000 or not held:  # on a busy machine others may hold it each time
        tries += 1
        try:
            lock = locked(path, "")
        except DatastoreError:
            continue
        os.close(os.open(inside, os.O_CREAT | os.O_EXCL))  # fails if another one is inside
        held += 1
        os.remove(inside)
        release(lock)
    print(held)
""")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no process is forked")
def test_a_fork_does_not_let_go_of_it(tmp_path):
    lock = locked(tmp_path / ".lock", "")
    if (child := os.fork()) == 0:
        release(lock)
        os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(DatastoreError, match="busy"):
        locked(tmp_path / ".lock", "busy")
    release(lock)
    release(locked(tmp_path / ".lock", "busy"))


def test_processes_hold_it_one_at_a_time(tmp_path):
    command = [sys.executable, "-c", HOLDS, str(tmp_path / ".lock"), str(tmp_path / "inside")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    processes = [subprocess.Popen(command, text=True, **pipes) for _ in range(4)]
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        out, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        assert int(out) > 0
    assert not list(tmp_path.iterdir())


def bind(path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)


def link(path) -> None:
    path.with_name("victim").write_text("mine")
    path.symlink_to(path.with_name("victim"))


@pytest.mark.parametrize("put", [os.mkdir, os.mkfifo, bind, link])
def test_what_is_no_file_is_no_lock(tmp_path, monkeypatch, put):
    monkeypatch.chdir(tmp_path)  # the path of a socket is short
    path = tmp_path / ".lock"
    put(path)
    with pytest.raises(DatastoreError, match=f"{path} is not a file, but should be that of a lock"):
        locked(path, "")
    assert path.exists()
