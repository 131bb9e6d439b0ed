"""A log gives back every call whose record is whole, wherever it was cut or changed."""

from __future__ import annotations

import os
import struct
import zlib

import numpy as np
import pytest
from full_disk import full_disk

from hf_refspec import DatastoreError
from hf_refspec.drafting.sessions import log as log_module
from hf_refspec.drafting.sessions.log import LONGEST_CALL, SessionLog, read_log
from hf_refspec.drafting.token_ids import LARGEST_ID

CALLS = [
    ([1, 2, 3], [4, 5]),
    ([7], [LARGEST_ID]),
    ([], [9]),
    (list(range(40)), list(range(0xF56866F6 % 2**24, 0xF56866F6 % 2**24 + 60))),
]


def written(path, calls=CALLS) -> list[int]:
    """Writes calls and returns the log's size before each and at the end."""
    log, sizes = SessionLog(path), [0]
    for prompt, output in calls:
        log.append(np.array(prompt, dtype=np.int64), np.array(output, dtype=np.int64))
        sizes.append(path.stat().st_size)
    log.close()
    return sizes


def record(prompt, output, lengths=None) -> bytes:
    """A record whose checksums are right, whatever it says."""
    ids = np.array([*prompt, *output], dtype="<i4").tobytes()
    head = struct.pack("<II", *(lengths or (len(prompt), len(output))))
    return b"\xf5hf\xf6" + head + struct.pack("<II", zlib.crc32(head), zlib.crc32(ids)) + ids


def unmarked_record(prompt, output) -> bytes:
    """A record as hf_refspec 0.1 wrote it."""
    ids = np.array([*prompt, *output], dtype="<i4").tobytes()
    head = struct.pack("<II", len(prompt), len(output))
    return head + struct.pack("<I", zlib.crc32(head + ids)) + ids


def as_lists(calls):
    return [(prompt.tolist(), output.tolist()) for prompt, output in calls]


def read(path, content: bytes):
    path.write_bytes(content)
    calls, damaged = read_log(path)
    return as_lists(calls), damaged


def test_reads_what_was_written(tmp_path):
    sizes = written(tmp_path / "log")
    assert (tmp_path / "log").read_bytes() == b"".join(record(*call) for call in CALLS)
    calls, damaged = read_log(tmp_path / "log")
    assert (as_lists(calls), damaged) == (CALLS, 0)
    assert sizes[-1] == (tmp_path / "log").stat().st_size


def test_cut_at_every_byte(tmp_path):
    """The last record of a process that was killed is no damage."""
    path = tmp_path / "log"
    sizes = written(path)
    content = path.read_bytes()
    for cut in range(len(content) + 1):
        whole = sum(size <= cut for size in sizes[1:])
        assert read(path, content[:cut]) == (CALLS[:whole], 0)


def test_a_changed_byte_costs_no_more_than_its_record(tmp_path):
    path = tmp_path / "log"
    sizes = written(path)
    content = path.read_bytes()
    for changed in range(len(content)):
        hit = sum(size <= changed for size in sizes[1:])
        calls, damaged = read(
            path,
            content[:changed] + bytes([content[changed] ^ 0x41]) + content[changed + 1 :],
        )
        assert calls == CALLS[:hit] + CALLS[hit + 1 :]
        assert damaged == sizes[hit + 1] - sizes[hit]


@pytest.mark.parametrize("more", [b"", b"\7\xf5\7"])
def test_bytes_that_are_missing_or_too_many_cost_no_more_than_their_record(tmp_path, more):
    path = tmp_path / "log"
    sizes = written(path)
    content = path.read_bytes()
    for place in range(len(content) - 1):
        hit = sum(size <= place for size in sizes[1:])
        calls, damaged = read(path, content[:place] + more + content[place + (not more) :])
        if more and place in sizes:
            assert (calls, damaged) == (CALLS, len(more))
        elif hit < len(CALLS) - 1:  # of the last record it may look as if it was cut short
            assert calls == CALLS[:hit] + CALLS[hit + 1 :] and damaged
        else:
            assert calls == CALLS[:-1]


@pytest.mark.parametrize("rubbish", [b"\0" * 100, b"\xff" * 100, b"\x01" * 13])
def test_rubbish_between_records(tmp_path, rubbish):
    path = tmp_path / "log"
    sizes = written(path)
    content = path.read_bytes()
    for size in sizes:
        assert read(path, content[:size] + rubbish + content[size:]) == (CALLS, len(rubbish))


@pytest.mark.parametrize(
    "hostile",
    [
        record([5], [2**31 - 1]),
        record([5], [LARGEST_ID + 1]),
        record([5], [-1]),
        record([], []),
        record([5], [6], (2**32 - 1, 2**32 - 1)),
        record([5], [6], (LONGEST_CALL, 1)),
        record([5], [6], (2, 2)),
    ],
)
def test_records_that_nobody_has_written(tmp_path, hostile):
    good = b"".join(record(*call) for call in CALLS)
    assert read(tmp_path / "log", good + hostile + good) == (CALLS + CALLS, len(hostile))


def test_lengths_that_reach_over_all_that_follows(tmp_path):
    """Each would have the rest of the log read once more."""
    path, good = tmp_path / "log", record([1], [2])
    liar = record([], [3], (0, 2**20))
    marked = good + liar * 200_000 + good
    calls, damaged = read(path, marked)
    assert (calls[0], damaged + len(good) * len(calls)) == (([1], [2]), len(marked))
    calls, damaged = read(path, good + b"\xf5hf\xf6" * 1_000_000 + good)
    assert calls[0] == ([1], [2]) and damaged >= 4_000_000
    unmarked = unmarked_record([1], [2]) + struct.pack("<III", 0, 0, 7) * 300_000
    assert read(path, unmarked) == ([([1], [2])], len(unmarked) - 20)


def test_logs_of_older_versions(tmp_path):
    path, content = tmp_path / "log", b"".join(unmarked_record(*call) for call in CALLS)
    assert read(path, content) == (CALLS, 0)
    first, second = (len(unmarked_record(*call)) for call in CALLS[:2])
    for changed in range(8, first):
        broken = content[:changed] + bytes([content[changed] ^ 0x41]) + content[changed + 1 :]
        assert read(path, broken) == (CALLS[1:], first)
    assert read(path, content[: first + second + 5]) == (CALLS[:2], 5)


def test_what_is_no_log(tmp_path):
    (tmp_path / "victim").write_bytes(record([1], [2]))
    os.symlink("victim", tmp_path / "link")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "sparse").touch()
    os.truncate(tmp_path / "sparse", 200 * 2**30)
    (tmp_path / "folder").mkdir()
    for name in ("link", "pipe", "sparse", "folder"):
        with pytest.raises(DatastoreError, match=f"{tmp_path / name} "):
            read_log(tmp_path / name)


def test_a_new_log_is_never_written_into_something(tmp_path):
    (tmp_path / "victim").write_bytes(b"dear to somebody")
    os.symlink("victim", tmp_path / "link")
    for name in ("victim", "link"):
        with pytest.raises(FileExistsError):
            SessionLog(tmp_path / name)
    assert (tmp_path / "victim").read_bytes() == b"dear to somebody"


def test_a_full_disk_leaves_the_log_as_it_was(tmp_path):
    path = tmp_path / "log"
    log = SessionLog(path)
    log.append(np.array([1]), np.array([2]))
    for room in range(len(record([3], [4]))):
        with full_disk(path.stat().st_size + room), pytest.raises(OSError, match=str(path)):
            log.append(np.array([3]), np.array([4]))
    assert path.read_bytes() == record([1], [2])
    log.append(np.array([5]), np.array([6]))
    log.close()
    assert as_lists(read_log(path)[0]) == [([1], [2]), ([5], [6])]


def test_is_full_before_it_is_too_large_to_be_read(tmp_path, monkeypatch):
    monkeypatch.setattr(log_module, "_FULL", 50)
    log = SessionLog(tmp_path / "log")
    for full in (False, False, True):
        assert log.is_full == full
        log.append(np.array([1]), np.array([2]))
