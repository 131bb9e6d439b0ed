"""Remembered sessions on disk: a SQLite database that many processes read and write at once.

    sessions.sqlite         the sessions, in the order of their ids, and their tokenizer
    sessions.sqlite-wal     the newest commits; this file and the next one are SQLite's own
    sessions.sqlite-shm

A session is on the disk when `append` returns. Ids are never used again: each process knows the
last one that it has read. The database is not trusted: it may have only the tables below, all pages
are checked when it is first opened, and each session when it is read.
"""

from __future__ import annotations

import itertools
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from ..corpus.untrusted import one_line
from ..index.token_buffer import LARGEST_ID
from .files import DatastoreError
from .stored_tokenizer import check_tokenizer, public_name, tokenizer_fingerprint

DATABASE = "sessions.sqlite"
# Tokens of a session, prompt and output. No model takes that number.
LONGEST_SESSION = 1 << 24
_TABLES = (
    "CREATE TABLE session (id INTEGER PRIMARY KEY AUTOINCREMENT, prompt_length INTEGER NOT NULL, "
    "tokens BLOB NOT NULL)",
    "CREATE TABLE tokenizer (fingerprint TEXT NOT NULL, name TEXT NOT NULL)",
)
# The application id, the format version and the tables (one is SQLite's own).
_EMPTY = (0, 0, set[str]())
_OURS = (0x68667273, 1, {*_TABLES, "CREATE TABLE sqlite_sequence(name,seq)"})
# An invalid session has NULL for its tokens: none are read before their size is checked.
_READ = """
SELECT id, prompt_length, CASE
    WHEN typeof(prompt_length) = 'integer' AND typeof(tokens) = 'blob' AND length(tokens) % 4 = 0
    AND length(tokens) > 0 AND prompt_length BETWEEN 0 AND length(tokens) / 4 THEN tokens
END FROM session WHERE id > ? AND length(tokens) <= ? ORDER BY id
"""
_TOKENIZER = "SELECT substr(fingerprint, 1, 100), substr(name, 1, 100) FROM tokenizer"
_TOKENS = np.dtype("<i4")
_BOUNDARY = np.array(-1, _TOKENS).tobytes()
# The memory that a row takes until it is in an array, in tokens.
_ROW = 32
_PATIENCE = 10.0  # seconds to wait for other processes


class Sessions(NamedTuple):
    """Concatenated sessions."""

    ids: np.ndarray  # int64 of shape (d,): in the database
    tokens: np.ndarray  # int32 of shape (n,): of each session the prompt, the output and -1
    ends: np.ndarray  # int32 of shape (d,): the position of the -1 after each session
    prompt_lengths: np.ndarray  # int32 of shape (d,): tokens of each prompt


class SessionDatabase:
    """The sessions in a folder, for one thread at a time.

    Its files are open only while they are read or written, so that a forked process inherits no
    connection of SQLite."""

    def __init__(
        self, folder: Path, most_tokens: int, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> None:
        self.folder = folder
        self.file = folder.absolute() / DATABASE
        self._largest = min(most_tokens, LONGEST_SESSION) * _TOKENS.itemsize
        self._connection: sqlite3.Connection | None = None  # in the block of `opened`
        self._is_checked = False
        if folder.is_file():
            raise FileExistsError(f"{folder} is a file; name a folder for past sessions")
        folder.mkdir(parents=True, exist_ok=True)
        with self.opened() as connection:
            if tokenizer is None:
                return
            if (known := connection.execute(_TOKENIZER).fetchone()) is None:
                names = tokenizer_fingerprint(tokenizer), public_name(tokenizer)
                insert = f"INSERT INTO tokenizer SELECT ?, ? WHERE NOT EXISTS ({_TOKENIZER})"
                connection.execute(insert, names)  # unless another process has done so meanwhile
                known = connection.execute(_TOKENIZER).fetchone()
        check_tokenizer(folder, tokenizer, "choose a new path", *known)

    def append(self, prompt: np.ndarray, output: np.ndarray, oldest: int) -> None:
        """Adds a session of a prompt (p,) and an output (n,), and deletes ids below `oldest`."""
        tokens = np.concatenate((prompt, output)).astype(_TOKENS).tobytes()
        values = "INSERT INTO session (prompt_length, tokens) VALUES (?, ?)"
        with self.opened() as connection, connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute(values, (len(prompt), tokens))
            connection.execute("DELETE FROM session WHERE id < ?", (oldest,))

    def read(self, after: int, batch_tokens: int = 1 << 20) -> Iterator[Sessions]:
        """The sessions whose ids are above `after`, about `batch_tokens` tokens at a time."""
        batch: list[tuple[int, int, bytes]] = []
        size = 0
        with self.opened() as connection:
            newest = "SELECT coalesce(max(seq), 0) >= ? FROM sqlite_sequence"
            if not connection.execute(newest, (after,)).fetchone()[0]:
                raise DatastoreError(
                    f"{self.file} is not the file any more that was read; make a new SessionDrafts"
                )
            for row in connection.execute(_READ, (after, self._largest)):
                if row[2] is None:
                    raise DatastoreError(f"{self.file} is damaged: row {row[0]} is not a session")
                batch.append(row)
                size += len(row[2]) // _TOKENS.itemsize + _ROW
                if size >= batch_tokens:
                    yield self._sessions(batch)
                    batch = []
                    size = 0
            if batch:
                yield self._sessions(batch)

    def oldest(self, default: int) -> int:
        """The smallest id; `default` if there are no sessions."""
        with self.opened() as connection:
            return connection.execute("SELECT min(id) FROM session").fetchone()[0] or default

    def clear(self) -> None:
        """Deletes all sessions, and their tokens from all files."""
        with self.opened() as connection:
            connection.execute("DELETE FROM session")
            connection.execute("VACUUM")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    @contextmanager
    def opened(self) -> Iterator[sqlite3.Connection]:
        """Opens the files for a block, once; raises SQLite's errors as DatastoreErrors."""
        if self._connection is not None:
            yield self._connection
            return
        try:
            with closing(self._connect()) as self._connection:
                yield self._connection
        except (sqlite3.Error, OSError) as error:
            damaged = isinstance(error, sqlite3.DatabaseError)
            damaged &= not isinstance(error, sqlite3.OperationalError)
            what = "is damaged" if damaged else "cannot be used"
            raise DatastoreError(f"{self.file} {what}: {one_line(error):.200}") from None
        finally:
            self._connection = None

    def _connect(self) -> sqlite3.Connection:
        size = self._checked_size()
        connection = sqlite3.connect(
            self.file, timeout=_PATIENCE, isolation_level=None, check_same_thread=False
        )
        # Ends the check of a table with a cycle: a sound file of this size takes fewer steps.
        steps = itertools.count()
        connection.set_progress_handler(lambda: next(steps) > 1000 + size // 100, 1000)
        try:
            for setting in ("trusted_schema = OFF", "cell_size_check = ON", "synchronous = FULL"):
                connection.execute(f"PRAGMA {setting}")
            with connection:
                connection.execute("BEGIN")  # one snapshot: another process may be making it
                found = _identity(connection)
            if found not in (_EMPTY, _OURS):
                raise DatastoreError(
                    f"{self.file} is not a session store that this hf_refspec can read "
                    f"(application id {found[0]:#x}, format {found[1]}); choose a new path"
                )
            # In this mode readers and a writer do not wait for each other. Setting it fails while
            # another process sets it too.
            with suppress(sqlite3.OperationalError):
                connection.execute("PRAGMA journal_mode = WAL")
            if found == _EMPTY:
                _make(connection)
            if not self._is_checked:
                (result,) = connection.execute("PRAGMA quick_check(1)").fetchone()
                if result != "ok":
                    raise sqlite3.DatabaseError(result)
                self._is_checked = True
        except BaseException:
            connection.close()
            raise
        connection.set_progress_handler(None, 0)
        return connection

    def _checked_size(self) -> int:
        """The total size of the files; refuses links, which SQLite would write through."""
        size = 0
        for name in (DATABASE, f"{DATABASE}-wal", f"{DATABASE}-shm", f"{DATABASE}-journal"):
            try:
                found = (self.file.parent / name).lstat()
            except FileNotFoundError:
                continue
            if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
                raise DatastoreError(
                    f"{self.file.parent / name} is not a file, or a link to one (hard or symbolic),"
                    " which a session store does not have; move it elsewhere"
                )
            size += found.st_size
        return size

    def _sessions(self, rows: list[tuple[int, int, bytes]]) -> Sessions:
        ids, prompt_lengths, blobs = zip(*rows, strict=True)
        tokens = np.frombuffer(_BOUNDARY.join(blobs) + _BOUNDARY, _TOKENS).astype(np.int32)
        ends = np.cumsum([len(blob) // _TOKENS.itemsize + 1 for blob in blobs], dtype=np.int32) - 1
        if not np.array_equal(np.flatnonzero((tokens < 0) | (tokens > LARGEST_ID)), ends):
            raise DatastoreError(f"{self.file} is damaged: it has impossible token ids")
        return Sessions(np.array(ids), tokens, ends, np.array(prompt_lengths, dtype=np.int32))


def _identity(connection: sqlite3.Connection) -> tuple[int, int, set[str]]:
    """The application id, the format version and the tables of a database."""
    (application_id,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    tables = connection.execute("SELECT sql FROM sqlite_master").fetchall()
    return application_id, version, {sql for (sql,) in tables}


def _make(connection: sqlite3.Connection) -> None:
    """Creates the tables of a new database, unless another process does so meanwhile."""
    with connection:
        connection.execute("BEGIN IMMEDIATE")
        if _identity(connection) == _EMPTY:
            for table in _TABLES:
                connection.execute(table)
            connection.execute(f"PRAGMA application_id = {_OURS[0]}")
            connection.execute(f"PRAGMA user_version = {_OURS[1]}")
