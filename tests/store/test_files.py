"""What the files of a stored folder may hold, and that everything else is refused by name."""

import json
import os
import struct
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from hf_refspec.store.files import (
    LOCK,
    Blocks,
    DatastoreError,
    FileEntry,
    check_file,
    copy_file,
    locked,
    new_folder,
    read_arrays,
    write_arrays,
    write_bytes,
)
from tests.helpers.stored import (
    SHARD,
    UINT16,
    entry_of,
    flip_last_bit,
    four_tokens,
    in_children,
    readers,
)


def file_of(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file, perhaps with a header that says another length of itself."""
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def tensor(kind: str = "U16", shape: Any = (4,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": kind, "shape": list(shape), "data_offsets": list(offsets)}


def refused_file(folder: Path, content: bytes, expected: dict = UINT16) -> str:
    """The message with which a file is refused whose size and checksum are as said."""
    path = folder / "tokens-00001.safetensors"
    path.write_bytes(content)
    with pytest.raises(DatastoreError) as error:
        read_arrays(folder, entry_of(path), expected)
    message = str(error.value)
    assert f"{path} is damaged: " in message
    return message


@pytest.mark.parametrize("length", [0, 1, 5, 100_000])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.int32])
def test_arrays_come_back_as_they_were_written(tmp_path, dtype, length):
    array = np.random.default_rng(length).integers(0, 100, length).astype(dtype)
    arrays = {"b": array, "a": array[::-1]}
    entry = write_arrays(tmp_path / "tokens-00001.safetensors", arrays)
    assert os.listdir(tmp_path) == [entry.name]
    path = tmp_path / entry.name
    assert entry == entry_of(path)
    assert path.stat().st_mode & 0o777 == 0o644
    check_file(tmp_path, entry)
    read = read_arrays(tmp_path, entry, {name: (np.dtype(dtype), None) for name in arrays})
    assert {name: each.tolist() for name, each in read.items()} == {
        name: each.tolist() for name, each in arrays.items()
    }
    read = read_arrays(tmp_path, entry, {"a": (np.dtype(dtype), length)})
    assert list(read) == ["a"]


def test_arrays_that_are_open_outlive_their_replacement(tmp_path):
    path = tmp_path / "tokens-00001.safetensors"
    old = write_arrays(path, {"tokens": np.arange(4, dtype=np.uint16)})
    arrays = read_arrays(tmp_path, old, UINT16)
    new = write_arrays(path, {"tokens": np.zeros(9, np.uint16)})
    assert arrays["tokens"].tolist() == [0, 1, 2, 3]
    with pytest.raises(DatastoreError, match=r"is damaged: it has .* bytes, but config.json says"):
        read_arrays(tmp_path, old, UINT16)
    assert new.size != old.size


def test_a_missing_file_is_named(tmp_path):
    for read in readers(tmp_path, SHARD.tokens_file):
        with pytest.raises(DatastoreError, match=r"tokens-00001.safetensors .* is missing"):
            read()


@pytest.mark.parametrize(
    "change", [lambda b: b"", lambda b: b[:-1], lambda b: b + b"\0", lambda b: b[:8]]
)
def test_a_file_of_another_size_is_refused(tmp_path, change):
    entry = four_tokens(tmp_path)
    path = tmp_path / entry.name
    path.write_bytes(change(path.read_bytes()))
    for read in readers(tmp_path, entry):
        with pytest.raises(DatastoreError, match=rf"{entry.name} is damaged: it has .* bytes, but"):
            read()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 7,
        file_of({}),
        file_of(b"{"),
        file_of(b'{"tokens":' + b"[" * 10_000),
        file_of({"other": tensor()}, bytes(8)),
        file_of({"tokens": tensor("I16")}, bytes(8)),
        file_of({"tokens": tensor("U32", [2])}, bytes(8)),
        file_of({"tokens": tensor(shape=[3], offsets=(0, 6))}, bytes(6)),
        file_of({"tokens": tensor(shape=[2, 2])}, bytes(8)),
        file_of({"tokens": tensor(shape=[], offsets=(0, 2))}, bytes(2)),
        file_of({"tokens": tensor(shape=[2**62, 2, 0], offsets=(0, 0))}),
        file_of({"tokens": tensor()}, bytes(7)),
        file_of({"x": tensor("U8", [1], (0, 1)), "tokens": tensor(offsets=(1, 9))}, bytes(9)),
        *(
            file_of({"tokens": tensor()}, bytes(8), length)
            for length in (1, 2**16, 2**32, 2**64 - 1)
        ),
    ],
)
def test_a_file_that_is_not_what_it_should_be_is_refused(tmp_path, content):
    refused_file(tmp_path, content)


def test_a_huge_header_is_not_parsed(tmp_path):
    header = {f"{i:x}": tensor("U8", [0], (0, 0)) for i in range(2000)}
    message = refused_file(tmp_path, file_of(header | {"tokens": tensor()}, bytes(8)))
    assert "its header should have" in message


# Writing

ARRAYS = {
    "tokens": np.arange(7, dtype=np.uint16),
    "bits": np.arange(3, dtype=np.uint8),
    "bounds": np.arange(2, dtype=np.int64),
    "keys": np.linspace(0, 1, 5, dtype=np.float32),
    "empty": np.empty(0, np.float16),
}


def test_a_file_is_the_one_that_safetensors_writes(tmp_path):
    path = tmp_path / "tokens-00001.safetensors"
    write_arrays(path, ARRAYS)
    assert path.read_bytes() == save(ARRAYS)


def test_blocks_are_written_as_the_whole_array(tmp_path):
    whole = np.arange(1000, dtype=np.float32)
    rows = (whole.reshape(-1, 4)[begin : begin + 7] for begin in range(0, 250, 7))
    blocks = Blocks(whole.dtype, 1000, (row.astype(np.float64) for row in rows))
    one = write_arrays(tmp_path / "one", {"keys": blocks, "tokens": ARRAYS["tokens"]})
    two = write_arrays(tmp_path / "two", {"keys": whole, "tokens": ARRAYS["tokens"]})
    assert (one.size, one.sha256) == (two.size, two.sha256)
    assert one == entry_of(tmp_path / "one")


@pytest.mark.parametrize("length", [5, 11])
def test_blocks_of_another_length_leave_nothing(tmp_path, length):
    blocks = Blocks(np.dtype(np.uint8), length, [np.zeros(4, np.uint8)] * 2)
    with pytest.raises(ValueError, match=f"keys has 8 numbers instead of {length}"):
        write_arrays(tmp_path / "file", {"keys": blocks})
    assert not list(tmp_path.iterdir())


PUT = {
    "link": lambda path, victim: path.symlink_to(victim),
    "dangling link": lambda path, victim: path.symlink_to(victim.with_name("nothing")),
    "hard link": lambda path, victim: path.hardlink_to(victim),
    "pipe": lambda path, victim: os.mkfifo(path),
}


@pytest.mark.parametrize("put", PUT.values(), ids=PUT)
@pytest.mark.parametrize("place", [".file.new", "file"])
def test_nothing_is_written_through_what_was_put_there(tmp_path, put, place):
    folder, other, victim = tmp_path / "store", tmp_path / "other", tmp_path / "victim"
    folder.mkdir(), other.mkdir()
    victim.write_text("mine")
    entry = write_bytes(other / "file", b"theirs")
    for write in (
        lambda path: write_arrays(path, ARRAYS),
        lambda path: write_bytes(path, b"x"),
        lambda path: copy_file(other, entry, path.parent),
    ):
        put(folder / place, victim)
        write(folder / "file")
        assert victim.read_text() == "mine"
        assert set(os.listdir(tmp_path)) == {"store", "other", "victim"}
        for path in folder.iterdir():
            assert path.is_file() and not path.is_symlink() and path.stat().st_nlink == 1
            path.unlink()


# Reading


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="no such file")
def test_a_disk_that_fails_while_a_file_is_read():
    """Nothing is mapped at the address 0, so that the first byte of this file cannot be read."""
    for read in readers(Path("/proc/self"), FileEntry("mem", 0, "")):
        with pytest.raises(OSError, match="Input/output"):
            read()


def test_a_damaged_file_is_not_copied(tmp_path):
    entry = four_tokens(tmp_path)
    flip_last_bit(tmp_path / entry.name)
    (tmp_path / "copy").mkdir()
    with pytest.raises(DatastoreError, match=r"is damaged: its checksum is .*, but config.json"):
        copy_file(tmp_path, entry, tmp_path / "copy")
    assert not os.listdir(tmp_path / "copy")


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


def build(root: Path, name: str) -> int:
    """Builds folders at paths that others build at too; returns how many it made."""
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
    return made


def test_processes_that_build_at_one_path_do_not_disturb_each_other(tmp_path):
    names = "one", "two", "three", "fails"
    made = sum(in_children(*(partial(build, tmp_path, name) for name in names)))
    stores = os.listdir(tmp_path)
    assert 0 < made == len(stores) and {f"store{i}" for i in range(30)}.issuperset(stores)
    for store in stores:  # each is all of one process, and of one alone
        written = {file.name: file.read_text() for file in (tmp_path / store).iterdir()}
        assert len(set(written.values())) == 1 and sorted(written) == list("01234")


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
