"""The formats of a stored folder, and damage that knows them: config.json and a tokenizer as JSON,
arrays as safetensors, a retrieval cache's database as SQLite. config.json is made to vouch for what
its files become, so that what reads them is reached."""

from __future__ import annotations

import hashlib
import json
import random
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load, save

from hf_refspec.store.sessions import DATABASE

CONFIG = "config.json"
# Numbers at which types and formats end.
BOUNDARIES = [0, 1, -1, 2, 127, 128, 255, 256, 258, 259, 2**15, 2**16 - 1, 2**16, 2**24]
BOUNDARIES += [2**31 - 2, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**62, 2**63 - 1, 2**63]
BOUNDARIES += [2**64 - 1, 2**64, 10**30]
_LARGEST_READ = 1 << 24


@dataclass(frozen=True)
class Place:
    """A stored folder, an `outside` that nobody may change, with a file `victim`, and an empty
    folder `spare` to write into."""

    folder: Path
    outside: Path
    spare: Path

    @classmethod
    def around(cls, folder: Path) -> Place:
        """Makes a place around a folder."""
        place = cls(folder, folder.with_name("outside"), folder.with_name("spare"))
        place.outside.mkdir()
        place.spare.mkdir()
        (place.outside / "victim").write_text("what is here is somebody else's\n")
        return place

    def some_file(self, generator: random.Random, glob: str = "*") -> Path:
        """A file of the folder that still is one, and has a content."""
        files = [file for file in sorted(self.folder.glob(glob)) if is_plain(file)]
        return generator.choice([file for file in files if file.stat().st_size])

    def config(self) -> Any:
        return read_json(self.folder / CONFIG)


def is_plain(file: Path) -> bool:
    """Whether it is a file with a content that can be damaged: some have become something else."""
    try:
        about = file.lstat()
    except (OSError, ValueError):
        return False
    return stat.S_ISREG(about.st_mode) and about.st_size < _LARGEST_READ


def read_json(file: Path) -> Any:
    if not is_plain(file):
        raise ValueError(f"{file} is no file any more")
    return json.loads(file.read_bytes())


def write_config(folder: Path, content: Any) -> None:
    """Writes a config.json, whatever it says."""
    (folder / CONFIG).write_text(json.dumps(content))


def entries(content: Any) -> Iterator[dict[str, Any]]:
    """All entries of files in a config, at any depth."""
    if isinstance(content, dict):
        if {"name", "size", "sha256"} <= content.keys():
            yield content
        content = list(content.values())
    if isinstance(content, list):
        for each in content:
            yield from entries(each)


def forge(folder: Path) -> None:
    """Writes the sizes and checksums that the files have into config.json, if that can be read."""
    try:
        content = read_json(folder / CONFIG)
    except (ValueError, RecursionError):
        return
    for entry in entries(content):
        if is_plain(file := folder / str(entry["name"])):
            data = file.read_bytes()
            entry.update(size=len(data), sha256=hashlib.sha256(data).hexdigest())
    if content:
        write_config(folder, content)


# Damage of config.json, and of the tokenizer of a datastore

ESCAPE = "\x1b[31mred\x1b[0m\r\n\x9b2J\u202e"
STRANGE: list[Any] = [None, True, 1.5, float("nan"), float("inf"), -0.0, "", "x", [], {}, [[]]]
STRANGE += [ESCAPE, "\ud800", "\0", "é" * 3000, 10**400, {"a": [1, {"b": ESCAPE}]}]
STRANGE += [{"x": 10**400}, {"x": float("nan")}, [10**400], 10**18]
STRANGE += ["../outside/victim", "/etc/passwd", "config.json", "a" * 300, ".."]
# Parts of a tokenizer over which the library panics, or searches for long.
PARTS: list[dict[str, Any]] = [
    {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AA=="}},
    {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    {"decoder": {"type": "Strip", "content": "a", "start": 10**9, "stop": 5}},
    {"normalizer": {"type": "Replace", "pattern": {"Regex": "([a-z ]+)+$"}, "content": ""}},
    {"normalizer": {"type": "Replace", "pattern": {"Regex": "^(([a-z])+.)+[A-Z]"}, "content": ""}},
]
# Some of them mean something somewhere.
NAMES = [ESCAPE, "unknown", "\ud800", "kind", "format", "sha256", "retired"]
NAMES += ["mat", "license", "corpus", "documents", "shard_tokens", "deduplicated", "encoder"]


def mutate_config(place: Place, generator: random.Random) -> str:
    """Puts something else into a place of the config, or damages its text as a whole."""
    path = place.folder / CONFIG
    if not is_plain(path):
        raise ValueError(f"{path} is no file any more")
    if generator.random() < 0.15:
        what = generator.choice(list(TEXTS))
        path.write_bytes(TEXTS[what](path.read_bytes()))
        return what
    content = read_json(path)
    done = [mutate_value(content, generator) for _ in range(generator.choice([1, 1, 1, 2, 3]))]
    write_config(place.folder, content)
    return ", ".join(done)


def mutate_tokenizer(place: Place, generator: random.Random) -> str:
    """Changes a place of the tokenizer that a datastore carries."""
    path = place.folder / "tokenizer.json"
    content = read_json(path)
    if path.stat().st_size > 1 << 16:
        raise ValueError("each use of a large tokenizer takes long")
    if generator.random() < 0.3:
        content |= (part := generator.choice(PARTS))
        done = f"{part}"
    else:
        done = mutate_value(content, generator)
    path.write_text(json.dumps(content), "utf-8", "surrogatepass")
    forge(place.folder)
    return f"tokenizer: {done}"


def mutate_value(content: Any, generator: random.Random) -> str:
    """Changes one place of a config."""
    parent, key = generator.choice(places(content))
    value = parent[key]
    what = generator.choice(["deleted", "strange", "number", "near", "escape", "added", "repeated"])
    if what == "deleted":
        del parent[key]
    elif what == "strange":
        parent[key] = generator.choice(STRANGE)
    elif what == "near" and type(value) is int:
        parent[key] = generator.choice([value - 1, value + 1, -value, 2 * value, value // 2])
    elif what == "escape" and isinstance(value, str):
        parent[key] = value + ESCAPE
    elif what == "repeated" and isinstance(value, list):
        parent[key] = value * generator.choice([2, 40_000 // max(1, len(value))])
    elif what == "added" and isinstance(parent, dict):
        parent[generator.choice(NAMES)] = generator.choice([value, *STRANGE])
    else:
        parent[key] = generator.choice(BOUNDARIES) + generator.choice([-1, 0, 1])
    return f"{key} {what}"


def keys_of(content: Any) -> Any:
    return list(content) if isinstance(content, dict) else range(len(content))


def places(content: Any) -> list[tuple[Any, Any]]:
    """All places of a config, at any depth: what holds them, and their keys."""
    found = [(content, key) for key in keys_of(content)]
    for _, key in found.copy():
        if isinstance(content[key], dict | list):
            found += places(content[key])
    return found


TEXTS = {
    "empty": lambda text: b"",
    "no object": lambda text: b"[" + text + b"]",
    "nested too deep": lambda text: b'{"source": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "nested deep": lambda text: text.replace(
        b'"source": {', b'"source": {"x": ' + b"[" * 300 + b"]" * 300 + b", "
    ),
    "every key twice": lambda text: text.rstrip()[:-1] + b"," + text.lstrip()[1:],
    "too large": lambda text: text + b" " * (1 << 23),
    "a number of 9,000 digits": lambda text: text.replace(b"1", b"1" * 9000, 1),
    "a byte order mark": lambda text: b"\xef\xbb\xbf" + text,
    "not UTF-8": lambda text: text.replace(b'"', b'"\xff\xfe', 3),
    "UTF-16": lambda text: text.decode("utf-8", "replace").encode("utf-16"),
    "an infinite number": lambda text: text.replace(b": 1", b": 1e999", 1),
    "zeros": lambda text: bytes(len(text)),
}


# Damage of arrays

TYPES = ["BOOL", "U8", "I8", "I16", "U16", "F16", "BF16", "I32", "U32", "F32", "F64", "I64"]


def mutate_header(place: Place, generator: random.Random) -> str:
    """Makes a header say something else of the same numbers."""
    file = place.some_file(generator, "*.safetensors")
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, numbers = json.loads(content[8 : 8 + length]), content[8 + length :]
    name = generator.choice([each for each in header if each != "__metadata__"])
    what = generator.choice(["offsets", "shape", "type", "names", "longer", "length", "overlap"])
    about = header[name]
    if what == "offsets":
        at = generator.randrange(2)
        value = about["data_offsets"][at]
        near = [value - 1, value + 1, value - 8, value + 8, *BOUNDARIES]
        about["data_offsets"][at] = generator.choice(near)
    elif what == "shape":
        shape = about["shape"]
        shapes = [[], [0], [1, *shape], [*shape, 1], [0, *shape], [2**32, 2**32], [-1], shape * 2]
        shapes += [[generator.choice(BOUNDARIES)], [1.5], ["x"], None]
        about["shape"] = generator.choice(shapes)
    elif what == "type":
        about["dtype"] = generator.choice([*TYPES, "U64", "F8_E4M3", "", "X", 3])
    elif what == "names":
        other = generator.choice(["", "x", "\x1b[31m", "__metadata__", *header])
        header.pop(name)
        if generator.random() < 0.7:
            header[other] = about
    elif what == "overlap":
        header[name] = header[generator.choice(list(header))]
    text = json.dumps(header).encode()
    if what == "longer":
        text += b" " * generator.choice([1, 3, 7, 1 << 16, 1 << 20])
    stated = len(text)
    if what == "length":
        stated = generator.choice([*BOUNDARIES, len(text) + 1, len(text) - 1]) % 2**64
    file.write_bytes(stated.to_bytes(8, "little") + text + numbers)
    forge(place.folder)
    return f"{what} of {name} in {file.name}"


def mutate_numbers(place: Place, generator: random.Random) -> str:
    """Puts other numbers into arrays that are sound as such."""
    file = place.some_file(generator, "*.safetensors")
    arrays = {name: array.copy() for name, array in load(file.read_bytes()).items()}
    done = []
    for _ in range(generator.choice([1, 1, 2, 6])):
        name = generator.choice(sorted(arrays))
        if len(arrays[name]):
            done.append(f"{name} {_mutate_array(arrays[name], generator)}")
    file.write_bytes(save(arrays))
    forge(place.folder)
    return f"{', '.join(done)} in {file.name}"


def _mutate_array(array: np.ndarray, generator: random.Random) -> str:
    """Changes some numbers of an array in place."""
    start = generator.randrange(len(array))
    part = array[start : start + generator.choice([1, 1, 2, 16, len(array)])]
    what = generator.choice(["number", "number", "all", "shuffled", "reversed", "random"])
    chance = np.random.default_rng(generator.getrandbits(32))
    if what in ("number", "all"):
        (part if what == "number" else array)[:] = value = _number(array, generator)
        return f"{value} at {start}"
    if what == "shuffled":
        chance.shuffle(part)
    elif what == "reversed":
        array[:] = array[::-1].copy()
    else:
        part[:] = np.frombuffer(chance.bytes(part.nbytes), array.dtype)
    return f"{what} at {start}"


def _number(array: np.ndarray, generator: random.Random) -> Any:
    """A number at a boundary of an array's type, or of what is in it."""
    if array.dtype.kind == "f":
        numbers = [np.nan, np.inf, -np.inf, 0, -1, 1e-45, 3e38, 6e4, generator.random()]
        return np.array(generator.choice(numbers)).astype(array.dtype)
    near = [len(array), int(array.max()), int(array.min()), *BOUNDARIES]
    value = generator.choice(near) + generator.choice([-1, 0, 0, 1])
    info = np.iinfo(array.dtype)
    return np.array(min(max(value, int(info.min)), int(info.max)), dtype=array.dtype)


def mutate_lengths(place: Place, generator: random.Random) -> str:
    """Changes an array's length, and all numbers of config.json that were that length."""
    file = place.some_file(generator, "*.safetensors")
    arrays = dict(load(file.read_bytes()))
    name = generator.choice(sorted(arrays))
    before = len(arrays[name])
    after = generator.choice([0, 1, 2, 3, 8, 64, 400, before + 1, max(before - 1, 0)])
    # All arrays of that length, so that what fits together still does.
    for each, array in arrays.items():
        if len(array) in (before, before + 1):
            arrays[each] = np.resize(array, max(len(array) + after - before, 0))
    file.write_bytes(save(arrays))
    if is_plain(place.folder / CONFIG):
        config = place.config()
        _renumber(config, before, after)
        write_config(place.folder, config)
    forge(place.folder)
    return f"{name} in {file.name} has {after} instead of {before}"


def _renumber(content: Any, before: int, after: int) -> None:
    for key in keys_of(content):
        value = content[key]
        if isinstance(value, dict | list):
            _renumber(value, before, after)
        elif type(value) is int and abs(value - before) <= 1:
            content[key] = value + after - before


def mutate_sizes(place: Place, generator: random.Random) -> str:
    """Makes a small folder claim a large vocabulary, or many next tokens, with arrays that fit."""
    if not all(map(is_plain, place.folder.iterdir())):  # such as a pipe
        raise ValueError(f"{place.folder} has something else in it by now")
    config, what = place.config(), "vocab_size"
    if "top_k" in config:
        what, size = "top_k", generator.choice([9, 64, 256, 257, 4096, 2**16])
    else:
        size = generator.choice([2**16 + 1, 3 * 10**8, 2**31 - 2])
    for file in sorted(place.folder.glob("*.safetensors")):
        arrays = dict(load(file.read_bytes()))
        for name, array in arrays.items():
            if what == "top_k" and name in ("tokens", "probs"):
                arrays[name] = np.resize(array, size * config["contexts"])
            elif what == "vocab_size" and array.dtype == np.uint16:
                arrays[name] = array.astype(np.uint32)
                arrays[name][array == 2**16 - 1] = 2**32 - 1  # separators
        file.write_bytes(save(arrays))
    write_config(place.folder, config | {what: size})
    forge(place.folder)
    return f"{what} is {size}"


# Damage of a database by SQL, into what is sound as a database

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
