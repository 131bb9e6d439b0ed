"""Changes the database of a retrieval cache by SQL, into what is sound as a database."""

from __future__ import annotations

import random
import sqlite3
from contextlib import closing

from hf_refspec.store.sessions import DATABASE

from .forging import BOUNDARIES, Place, is_plain

# Ids, lengths and tokens that no session has. ?1 is a number, and ?2 are random bytes.
STATEMENTS = [
    "INSERT INTO session VALUES (?1, 1, x'0100000002000000')",
    "INSERT INTO session (prompt_length, tokens) VALUES (?1, ?2)",
    "INSERT INTO session (prompt_length, tokens) VALUES (0, zeroblob(abs(?1 % 200000000)))",
    "INSERT INTO session (prompt_length, tokens) VALUES (1, ?1)",
    "UPDATE session SET prompt_length = ?1 WHERE id % 7 = 3",
    "UPDATE session SET tokens = ?2 WHERE id % 7 = 3",
    "UPDATE session SET tokens = CAST(tokens AS TEXT) WHERE id = 9",
    "UPDATE session SET id = -id WHERE id % 2",
    "UPDATE session SET id = id + 4611686018427387904",
    "UPDATE sqlite_sequence SET seq = ?1",
    "DELETE FROM sqlite_sequence",
    "DELETE FROM session",
    "UPDATE tokenizer SET fingerprint = ?2, name = ?2",
    "INSERT INTO tokenizer VALUES ('x' || char(27), ?1)",
    "CREATE TABLE more AS SELECT * FROM session",
    "CREATE TRIGGER more AFTER INSERT ON session BEGIN DELETE FROM session; END",
    "CREATE INDEX more ON session (abs(prompt_length))",
    "DROP TABLE session",
    "PRAGMA user_version = 77",
    "PRAGMA application_id = 77",
    "PRAGMA journal_mode = DELETE",
]


def mutate_database(place: Place, generator: random.Random) -> str:
    """Runs one of the statements, on the file or on its log."""
    if not is_plain(place.folder / DATABASE):
        raise FileNotFoundError(DATABASE)
    statement = generator.choice(STATEMENTS)
    number = generator.choice([each for each in BOUNDARIES if -(2**63) <= each < 2**63])
    values = (number, generator.randbytes(generator.choice([1, 4, 8, 400])))
    with closing(sqlite3.connect(place.folder / DATABASE)) as connection:
        with connection:
            connection.execute(statement, values[: 2 if "?2" in statement else "?1" in statement])
        connection.execute("SELECT count(*) FROM session").fetchone()
    return f"{statement}, {number}"
