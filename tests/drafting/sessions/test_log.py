"""A log is read up to the last whole record, wherever it was cut or changed."""

from __future__ import annotations

import errno
import os

import numpy as np
import pytest

from hf_refspec.drafting.sessions.log import SessionLog, read_log

CALLS = [([1, 2, 3], [4, 5]), ([7], [2**31 - 1]), ([], [9]), (list(range(40)), list(range(60)))]


def written(path, calls=CALLS) -> list[int]:
    """Writes calls and returns the log's size before each and at the end."""
    log, sizes = SessionLog(path), [0]
    for prompt, output in calls:
        log.append(np.array(prompt, dtype=np.int64), np.array(output, dtype=np.int64))
        sizes.append(path.stat().st_size)
    log.close()
    return sizes


def as_lists(calls):
    return [(prompt.tolist(), output.tolist()) for prompt, output in calls]


def test_reads_what_was_written(tmp_path):
    sizes = written(tmp_path / "log")
    calls, size = read_log(tmp_path / "log")
    assert as_lists(calls) == CALLS
    assert size == sizes[-1]


def test_cut_at_every_byte(tmp_path):
    path = tmp_path / "log"
    sizes = written(path)
    content = path.read_bytes()
    for cut in range(len(content) + 1):
        path.write_bytes(content[:cut])
        whole = sum(size <= cut for size in sizes[1:])
        calls, size = read_log(path)
        assert as_lists(calls) == CALLS[:whole]
        assert size == sizes[whole]


def test_every_changed_byte_is_noticed(tmp_path):
    path = tmp_path / "log"
    sizes = written(path)
    content = path.read_bytes()
    for changed in range(len(content)):
        path.write_bytes(
            content[:changed] + bytes([content[changed] ^ 0x41]) + content[changed + 1 :]
        )
        before = sum(size <= changed for size in sizes[1:])
        assert as_lists(read_log(path)[0]) == CALLS[:before]


@pytest.mark.parametrize("rubbish", [b"\0" * 100, b"\xff" * 100, b"\x01" * 13])
def test_rubbish_after_the_last_record(tmp_path, rubbish):
    path = tmp_path / "log"
    written(path)
    with open(path, "ab") as file:
        file.write(rubbish)
    assert as_lists(read_log(path)[0]) == CALLS


def test_goes_on_behind_the_last_whole_record(tmp_path):
    path = tmp_path / "log"
    sizes = written(path)
    os.truncate(path, sizes[-1] - 3)
    _, size = read_log(path)
    log = SessionLog(path, size)
    log.append(np.array([1]), np.array([2]))
    log.close()
    assert as_lists(read_log(path)[0]) == [*CALLS[:-1], ([1], [2])]


def test_a_full_disk_leaves_the_log_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "log"
    written(path, [])
    log = SessionLog(path)
    log.append(np.array([1]), np.array([2]))
    write = os.write
    room = [7]

    def little_room(descriptor, data):
        if not room:
            raise OSError(errno.ENOSPC, "no space left")
        return write(descriptor, data[: room.pop()])

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", little_room)
        with pytest.raises(OSError, match="no space"):
            log.append(np.array([3]), np.array([4]))
    log.append(np.array([5]), np.array([6]))
    log.close()
    assert as_lists(read_log(path)[0]) == [([1], [2]), ([5], [6])]
