"""What is remembered on the disk outlives its process, whatever happens to that or to the files."""

import os
import re
import shutil
import sqlite3
import struct
import tracemalloc
from functools import partial

import numpy as np
import pytest

from hf_refspec import DatastoreError
from hf_refspec.index.token_buffer import LARGEST_ID
from hf_refspec.store.sessions import DATABASE, LONGEST_SESSION, SessionDatabase
from tests.helpers.byte_model import word_tokenizer
from tests.helpers.full_disk import full_disk
from tests.helpers.stored import in_a_child, in_children

FILES = [DATABASE, f"{DATABASE}-wal", f"{DATABASE}-shm", f"{DATABASE}-journal"]


def call(number: int) -> tuple[np.ndarray, np.ndarray]:
    """The same for the same number, also in another process."""
    rng = np.random.default_rng(number)
    return rng.integers(0, 50, 1 + number % 7), rng.integers(0, 50, 1 + number % 5)


def opened(path, most_tokens: int = 10**6, tokenizer=None) -> SessionDatabase:
    return SessionDatabase(path, most_tokens, tokenizer)


def stored(database: SessionDatabase, after: int = 0, batch_tokens: int = 1 << 20):
    """The sessions by their ids."""
    found = {}
    for ids, tokens, ends, prompt_lengths in database.read(after, batch_tokens):
        assert (tokens.dtype, ends.dtype, prompt_lengths.dtype) == (np.int32,) * 3
        begins = np.concatenate(([0], ends[:-1] + 1))
        for number, begin, end, length in zip(ids, begins, ends, prompt_lengths, strict=True):
            text = tokens[begin:end].tolist()
            found[int(number)] = text[:length], text[length:]
    return found


def expected(numbers) -> dict[int, tuple[list[int], list[int]]]:
    return {n + 1: tuple(each.tolist() for each in call(n)) for n in numbers}


@pytest.fixture(scope="module")
def closed(tmp_path_factory):
    """A folder of 60 calls."""
    path = tmp_path_factory.mktemp("sessions") / "closed"
    database = opened(path)
    with database.opened():
        for number in range(60):
            database.append(*call(number), oldest=0)
    return path


@pytest.fixture
def kept(closed, tmp_path):
    return shutil.copytree(closed, tmp_path / "cache")


def test_reads_what_was_appended(kept):
    database = opened(kept)
    assert stored(database) == stored(database, 0, 40) == expected(range(60))
    assert stored(database, 50) == expected(range(50, 60))
    short = opened(kept, most_tokens=5)
    assert stored(short) == {n: (p, o) for n, (p, o) in stored(database).items() if len(p + o) <= 5}
    with short.opened(), database.opened():
        assert {each.name for each in kept.iterdir()} == set(FILES[:3])
    assert {each.name for each in kept.iterdir()} == {DATABASE}


def test_the_oldest_go_and_their_place_is_used_again(tmp_path):
    database, other = opened(tmp_path), opened(tmp_path)
    sizes = []
    with database.opened():
        for number in range(1000):
            database.append(np.full(50, number), np.full(50, number), oldest=number - 98)
            if number % 100 == 99:
                sizes.append(sum(file.stat().st_size for file in tmp_path.iterdir()))
        assert list(stored(other)) == list(range(901, 1001)) and other.oldest(7) == 901
        assert sizes[-1] == sizes[-5] < 5_000_000  # nearly all of it SQLite's log
    assert (tmp_path / DATABASE).stat().st_size < 100_000


def test_what_is_cleared_is_in_no_file(kept):
    database, other = opened(kept), opened(kept)
    text = np.arange(3000, 3090)
    trace = text[40:60].astype("<i4").tobytes()
    with database.opened() as connection, other.opened() as others:
        database.append(text, text, oldest=0)
        connection.execute("PRAGMA wal_checkpoint")
        assert all(trace in (kept / name).read_bytes() for name in FILES[:2])
        others.execute("PRAGMA secure_delete = OFF")  # the default of some builds of SQLite
        other.clear()
        assert stored(database) == {} and database.oldest(default=77) == 77
        assert not any(trace in (kept / name).read_bytes() for name in FILES[:2])
    database.append(*call(0), oldest=0)
    assert list(stored(other)) == [62]  # no id comes twice


def append_50(process: int, path) -> int:
    database, newest = opened(path), 0
    for number in range(50):
        database.append(np.array([process]), np.array([number]), oldest=0)
        newest = max([newest, *stored(database, newest)])
    return newest


def test_processes_write_at_once(tmp_path):
    path = tmp_path / "cache"
    assert max(in_children(*(partial(append_50, process, path) for process in range(4)))) == 200
    found = list(stored(opened(path)).values())
    for process in range(4):
        assert [o for p, o in found if p == [process]] == [[number] for number in range(50)]


HOSTILE = [
    *(f"INSERT INTO session VALUES (?, 1, {tokens})" for tokens in ("'text'", "x''")),
    *(f"INSERT INTO session VALUES (?, 1, x'{ids}')" for ids in ("00000000ff", "ffffffff")),
    "INSERT INTO session VALUES (?, 1, x'01000001')",
    *(f"INSERT INTO session VALUES (?, {n}, x'01000000')" for n in (2, -1, 0.5, "'one'", "1e300")),
    "CREATE TABLE other (id)",
    "CREATE VIEW other AS SELECT * FROM session",
    "CREATE TRIGGER t AFTER INSERT ON session BEGIN DELETE FROM session; END",
    "CREATE INDEX i ON session (prompt_length)",
    "PRAGMA user_version = 2",
    "PRAGMA application_id = 5",
    "ALTER TABLE session ADD COLUMN more",
    "DROP TABLE tokenizer",
]


@pytest.mark.parametrize("statement", HOSTILE)
def test_what_no_cache_has_written(kept, statement):
    with sqlite3.connect(kept / DATABASE) as connection:
        connection.execute(statement, [100] * statement.count("?"))
    connection.close()
    with pytest.raises(DatastoreError, match=re.escape(str(kept))) as refused:
        database = opened(kept)
        stored(database)
        database.append(*call(0), oldest=0)
    assert str(refused.value).isprintable() and len(str(refused.value)) < 400


def test_the_largest_of_everything(kept):
    with sqlite3.connect(kept / DATABASE) as connection:
        connection.execute("DELETE FROM session")
        connection.execute("INSERT INTO session VALUES (?, 0, x'00000001')", [2**63 - 1])
        connection.execute(
            "INSERT INTO session VALUES (5, 0, zeroblob(?))", [4 * LONGEST_SESSION + 4]
        )
    connection.close()
    database = opened(kept, 10**12)
    assert stored(database) == {2**63 - 1: ([], [LARGEST_ID])}
    with pytest.raises(DatastoreError, match=re.escape(f"{kept / DATABASE} cannot be used")):
        database.append(*call(0), oldest=0)  # there is no larger id


def table_page(rows: list[bytes], kind: int, begin: int = 0, last_child: int = 0) -> bytes:
    """A page of a table in SQLite's format, with these rows, or children of other pages."""
    page, end, places = bytearray(4096), 4096, []
    for row in rows:
        end -= len(row)
        page[end : end + len(row)] = row
        places.append(end)
    header = struct.pack(">BHHHB", kind, 0, len(rows), end, 0)
    header += struct.pack(">I", last_child) if kind == 5 else b""
    header += struct.pack(f">{len(places)}H", *places)
    page[begin : begin + len(header)] = header
    return bytes(page)


def test_a_schema_that_leads_in_circles_ends(tmp_path):
    """Pages whose 500 children are all the next page: SQLite would read a row 500 ** 4 times."""
    with sqlite3.connect(tmp_path / DATABASE) as connection:
        connection.execute("CREATE TABLE t (a UNIQUE)")
    connection.close()
    data = (tmp_path / DATABASE).read_bytes()
    pages = [data[begin : begin + 4096] for begin in range(0, len(data), 4096)]
    (sql,) = re.findall(rb"CREATE TABLE t \(a UNIQUE\)", pages[0])
    table = b"\x06\x17\x0f\x0f\x01" + bytes([13 + 2 * len(sql)]) + b"tablett\x02" + sql
    index = b"\x06\x17\x35\x0f\x01\x00" + b"indexsqlite_autoindex_t_1t\x03"
    rows = [bytes([len(row), number]) + row for number, row in ((1, table), (2, index))]
    first = len(pages) + 1
    pages += [table_page([row], 13) for row in rows]
    for page in range(first + 1, first + 5):
        pages.append(table_page([struct.pack(">IB", page, 3)] * 500, 5, 0, page))
    last = struct.pack(">IB", first, 1)
    root = table_page([last] + [struct.pack(">IB", first + 5, 3)] * 400, 5, 100, first + 5)
    header = bytearray(data[:100])
    header[28:32] = struct.pack(">I", len(pages))
    header[68:72] = struct.pack(">I", 0x68667273)
    pages[0] = bytes(header) + root[100:]
    (tmp_path / DATABASE).write_bytes(b"".join(pages))
    with pytest.raises(DatastoreError, match="interrupted"):
        opened(tmp_path)


def test_tiny_sessions_take_little_memory(tmp_path):
    database = opened(tmp_path)
    database.append(np.array([1]), np.array([2]), oldest=0)
    with sqlite3.connect(tmp_path / DATABASE) as connection:
        rows = ((1, b"\1\0\0\0") for _ in range(100_000))
        connection.executemany("INSERT INTO session (prompt_length, tokens) VALUES (?, ?)", rows)
    connection.close()
    tracemalloc.start()
    assert sum(len(sessions.ids) for sessions in database.read(0)) == 100_001
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20_000_000


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("make", ["link", "dangling", "circle", "hard link", "pipe", "folder"])
def test_links_pipes_and_folders_are_neither_followed_nor_deleted(kept, tmp_path, name, make):
    victim, place = tmp_path / "victim", kept / name
    victim.write_bytes(b"dear to somebody")
    place.unlink(missing_ok=True)
    {
        "link": lambda: place.symlink_to(victim),
        "dangling": lambda: place.symlink_to(tmp_path / "nothing"),
        "circle": lambda: place.symlink_to(place),
        "hard link": lambda: os.link(victim, place),
        "pipe": lambda: os.mkfifo(place),
        "folder": place.mkdir,
    }[make]()
    before = place.lstat()
    with pytest.raises(DatastoreError, match=re.escape(f"{place} is not a file, or a link")):
        opened(kept)
    assert victim.read_bytes() == b"dear to somebody" and not (tmp_path / "nothing").exists()
    assert place.lstat() == before


def test_another_database_stays_as_it_is(tmp_path):
    with sqlite3.connect(tmp_path / DATABASE) as connection:
        connection.execute("CREATE TABLE mine (a)")
    connection.close()
    before = (tmp_path / DATABASE).read_bytes()
    with pytest.raises(DatastoreError, match="is not a session store that"):
        opened(tmp_path)
    assert (tmp_path / DATABASE).read_bytes() == before
    with pytest.raises(FileExistsError, match=f"{tmp_path / DATABASE} is a file; name a folder"):
        opened(tmp_path / DATABASE)


def test_another_tokenizer(tmp_path, tokenizer):
    opened(tmp_path)
    opened(tmp_path, tokenizer=tokenizer)
    opened(tmp_path)  # remembers whose it is
    both = f"{tmp_path} was made for another tokenizer.*[0-9a-f]+, not .* with [0-9a-f]+"
    with pytest.raises(DatastoreError, match=both):
        opened(tmp_path, tokenizer=word_tokenizer("ab"))
    opened(tmp_path, tokenizer=tokenizer)


def test_a_full_disk(tmp_path):
    with full_disk(), pytest.raises(DatastoreError, match=f"{tmp_path}/cache/{DATABASE} cannot"):
        opened(tmp_path / "cache")
    database = opened(tmp_path / "cache")
    database.append(*call(0), oldest=0)
    for room in range(0, 30_000, 1000):
        found = stored(database)
        try:
            with full_disk(room):
                database.append(*call(len(found)), oldest=0)
        except DatastoreError as error:
            assert str(tmp_path) in str(error)
            assert stored(database) == found
    database.append(*call(len(found)), oldest=0)
    assert stored(opened(tmp_path / "cache")) == expected(range(len(found) + 1))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("mode", [0o555, 0o755])
def test_what_an_ordinary_user_may_not_write(kept, mode):
    for path in (kept, *kept.parents):
        path.chmod(path.stat().st_mode | 0o555)
    kept.chmod(mode)
    (kept / DATABASE).chmod(0o644)

    def open_as_nobody():
        os.setuid(65534)
        opened(kept)

    error = in_a_child(open_as_nobody)
    assert isinstance(error, DatastoreError)
    assert f"{kept / DATABASE} cannot be used: " in str(error)


def test_a_process_that_holds_the_database_is_waited_for(kept, monkeypatch):
    monkeypatch.setattr("hf_refspec.store.sessions._PATIENCE", 0.2)
    database, other = opened(kept), sqlite3.connect(kept / DATABASE, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(DatastoreError, match="locked"):
        database.append(*call(60), oldest=0)
    assert stored(database) == expected(range(60))
    other.execute("ROLLBACK")
    database.append(*call(60), oldest=0)
    assert stored(database) == expected(range(61))
    other.close()


def test_a_file_that_was_removed_or_replaced_is_not_read_on(tmp_path):
    database = opened(tmp_path / "store")
    database.append(*call(1), oldest=0)
    shutil.rmtree(tmp_path / "store")
    with pytest.raises(DatastoreError, match="cannot be used"):
        database.append(*call(2), oldest=0)
    opened(tmp_path / "store")
    with pytest.raises(DatastoreError, match="is not the file any more"):
        next(database.read(1))
