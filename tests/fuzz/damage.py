"""A stored folder with what is beside it, and what damages its files: their bytes, what stands in
their place, and places of JSON and numbers of arrays, for which config.json is mostly made to vouch
so that what reads them is reached. What SQL can do to a cache's database is in
tests/store/test_sessions.py."""

import hashlib
import json
import os
import random
import stat
from collections.abc import Callable, Iterator
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
ESCAPE = "\x1b[31mred\x1b[0m\r\n\x9b2J\u202e"
STRANGE: list[Any] = [None, True, 1.5, float("nan"), float("inf"), -0.0, "", "x", [], {}, [[]]]
STRANGE += [ESCAPE, "\ud800", "\0", "é" * 3000, 10**400, {"a": [1, {"b": ESCAPE}]}]
STRANGE += [{"x": 10**400}, {"x": float("nan")}, [10**400], 10**18, [-1], [2**32, 2**32]]
STRANGE += ["../outside/victim", "/etc/passwd", "config.json", "a" * 300, "..", "U64", "F16"]
# Some of them mean something somewhere.
NAMES = [ESCAPE, "unknown", "\ud800", "kind", "format", "sha256", "retired", "__metadata__"]
NAMES += ["mat", "license", "corpus", "documents", "shard_tokens", "deduplicated", "encoder"]
# Where a writer may write, or a reader look for more.
ADDED = [f".{CONFIG}.new", "tokens-00003.safetensors", ".ngrams.safetensors.new", "README.md"]
ADDED += [".lock", *(f"{DATABASE}-{name}" for name in ("wal", "shm", "journal"))]
_LARGEST_READ = 1 << 24
_HUGE = 200 << 30  # of a sparse file, which takes no room


@dataclass(frozen=True)
class Place:
    """A stored folder, an `outside` that nobody may change, with a file `victim`, and an empty
    folder `spare` to write into."""

    folder: Path
    outside: Path
    spare: Path

    @classmethod
    def around(cls, folder: Path) -> "Place":
        """Makes a place around a folder."""
        place = cls(folder, folder.with_name("outside"), folder.with_name("spare"))
        place.outside.mkdir()
        place.spare.mkdir()
        (place.outside / "victim").write_text("what is here is somebody else's\n")
        return place

    def some_file(self, rng: random.Random, glob: str = "*") -> Path:
        """A file of the folder that still is one, and has a content."""
        files = [file for file in sorted(self.folder.glob(glob)) if is_plain(file)]
        return rng.choice([file for file in files if file.stat().st_size])


def is_plain(file: Path) -> bool:
    """Whether it is a file with a content that can be damaged: some have become something else."""
    try:
        about = file.lstat()
    except (OSError, ValueError):
        return False
    return stat.S_ISREG(about.st_mode) and about.st_size < _LARGEST_READ


def entries(content: Any) -> Iterator[dict[str, Any]]:
    """All entries of files in a config, at any depth."""
    if isinstance(content, dict):
        if {"name", "size", "sha256"} <= content.keys():
            yield content
        content = list(content.values())
    if isinstance(content, list):
        for each in content:
            yield from entries(each)


def forge(place: Place) -> None:
    """Writes the sizes and checksums that the files have into config.json, if that can be read."""
    if not is_plain(place.folder / CONFIG):
        return
    try:
        content = json.loads((place.folder / CONFIG).read_bytes())
    except (OSError, ValueError, RecursionError):
        return
    for entry in entries(content):
        if is_plain(file := place.folder / str(entry["name"])):
            data = file.read_bytes()
            entry.update(size=len(data), sha256=hashlib.sha256(data).hexdigest())
    (place.folder / CONFIG).write_text(json.dumps(content))


def content(place: Place, rng: random.Random) -> str:
    """Flips a bit, overwrites, inserts or deletes some bytes, or cuts the file."""
    file = place.some_file(rng)
    data = bytearray(file.read_bytes())
    # The header, at the beginning, is hit more often than its share.
    at = rng.randrange(min(len(data), rng.choice([16, 200, len(data)])))
    length = rng.choice([1, 2, 4, 8, 64, 300])
    changes = {
        "flipped": (at, at + 1, bytes([data[at] ^ 1 << rng.randrange(8)])),
        "random": (at, at + length, rng.randbytes(length)),
        "filled": (at, at + length, bytes([rng.choice([0, 1, 127, 128, 254, 255])]) * length),
        "inserted": (at, at, rng.randbytes(length)),
        "deleted": (at, at + length, b""),
        "cut": (rng.choice([0, 1, 7, 8, 9, len(data) // 2, len(data) - 1]), len(data), b""),
    }
    [what] = rng.choices(list(changes), [6, 1, 2, 1, 1, 2])
    start, stop, new = changes[what]
    data[start:stop] = new
    file.write_bytes(data)
    return f"{file.name} {what}, {len(new)} bytes from {start} to {stop}"


def put(place: Place, rng: random.Random) -> str:
    """Puts something else in the place of a file, or where there is none."""
    named = sorted(file.name for file in place.folder.iterdir())
    file = place.folder / rng.choice(rng.choice([named, [*ADDED, f".{rng.choice(named)}.new"]]))
    data = file.read_bytes() if is_plain(file) else b""
    file.unlink(missing_ok=True)
    copy = place.outside / file.name
    targets = [copy, file, place.outside / "victim", place.outside / "nothing", "/dev/zero"]
    target = rng.choice([*targets, place.outside])
    things: dict[str, Callable[[], Any]] = {
        "missing": lambda: None,
        "folder": file.mkdir,
        "pipe": lambda: os.mkfifo(file),
        "socket": lambda: os.mknod(file, stat.S_IFSOCK | 0o600),
        "sparse": lambda: (file.touch(), os.truncate(file, _HUGE)),
        "unreadable": lambda: (file.write_bytes(data), file.chmod(0)),
        "garbage": lambda: file.write_bytes(rng.randbytes(rng.choice([0, 200]))),
        "hard link to a victim": lambda: os.link(place.outside / "victim", file),
        f"link to {target}": lambda: file.symlink_to(target),
    }
    [what] = rng.choices(list(things), [1, 1, 1, 1, 1, 1, 2, 1, 6])
    if target == copy:
        copy.write_bytes(data)
    things[what]()
    return f"{file.name} is now {what}"


def in_json(place: Place, rng: random.Random) -> str:
    """Changes places of config.json, or of a tokenizer that is not so large that uses take long."""
    path = place.folder / "tokenizer.json"
    if rng.random() < 0.8 or not is_plain(path) or path.stat().st_size > 1 << 16:
        path = place.some_file(rng, CONFIG)
    read, done = json.loads(path.read_bytes()), []
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        parent, key = rng.choice(places(read))
        value = parent[key]
        what = rng.choice(["deleted", "strange", "number", "near", "escape", "added", "repeated"])
        if what == "deleted":
            del parent[key]
        elif what == "strange":
            parent[key] = rng.choice(STRANGE)
        elif what == "near" and type(value) is int:
            parent[key] = rng.choice([value - 1, value + 1, value + 8, -value, value // 2])
        elif what == "escape" and isinstance(value, str):
            parent[key] = value + ESCAPE
        elif what == "repeated" and isinstance(value, list):
            parent[key] = value * rng.choice([2, 40_000 // max(1, len(value))])
        elif what == "added" and isinstance(parent, dict):
            parent[rng.choice(NAMES)] = rng.choice([value, *STRANGE])
        else:
            parent[key] = rng.choice(BOUNDARIES) + rng.choice([-1, 0, 1])
        done.append(f"{key} {what}")
    path.write_text(json.dumps(read))
    return f"{', '.join(done)} in {path.name}"


def places(content: Any) -> list[tuple[Any, Any]]:
    """All places of JSON, at any depth: what holds them, and their keys."""
    keys = list(content) if isinstance(content, dict) else range(len(content))
    inner = [content[key] for key in keys if isinstance(content[key], dict | list)]
    return [*((content, key) for key in keys), *(each for part in inner for each in places(part))]


def numbers(place: Place, rng: random.Random) -> str:
    """Puts other numbers into an array that is sound as such, or gives it another length."""
    file = place.some_file(rng, "*.safetensors")
    arrays = {name: array.copy() for name, array in load(file.read_bytes()).items()}
    name = rng.choice([name for name in sorted(arrays) if len(arrays[name])])
    array, chance = arrays[name], np.random.default_rng(rng.getrandbits(32))
    start = rng.choice([0, rng.randrange(len(array))])
    part = array[start : start + rng.choice([1, 1, 2, 16, len(array)])]
    if array.dtype.kind == "f":
        values: list[Any] = [np.nan, np.inf, -np.inf, 0, -1, 1e-45, 3e38, 6e4, rng.random()]
    else:
        info, near = np.iinfo(array.dtype), [len(array), int(array.max()), *BOUNDARIES]
        near = [each + rng.choice([-1, 0, 0, 1]) for each in near]
        values = [min(max(each, int(info.min)), int(info.max)) for each in near]
    others = {
        "number": np.array(rng.choice([*values, array[rng.randrange(len(array))]])),
        "shuffled": chance.permutation(part),
        "random": np.frombuffer(chance.bytes(part.nbytes), array.dtype),
    }
    [what] = rng.choices([*others, "length"], [5, 2, 1, 1])
    if what == "length":
        arrays[name] = np.resize(array, rng.choice([0, 1, 8, 400, len(array) + 1]))
    else:
        part[:] = others[what].astype(array.dtype)
    file.write_bytes(save(arrays))
    return f"{len(part)} of {name} from {start} in {file.name}: {what}"


# Each with its weight.
MUTATIONS = {content: 14, put: 11, in_json: 12, numbers: 14}


def damage(place: Place, rng: random.Random) -> str:
    """Damages a folder; returns what was done, in words."""
    done: list[str] = []
    wanted = rng.choice([1, 1, 1, 1, 2, 3])
    for _ in range(20):
        if len(done) == wanted:
            break
        [mutate] = rng.choices(list(MUTATIONS), list(MUTATIONS.values()))
        try:
            done.append(f"{mutate.__name__}: {mutate(place, rng)}")
        except Exception:  # there is no such file, or one before has left nothing of it
            continue
        if mutate is numbers or rng.random() < 0.6:
            forge(place)
            done[-1] += ", forged"
    return "; ".join(done)
