"""A stored folder with what is beside it, and damage of its files as such."""

from __future__ import annotations

import hashlib
import json
import os
import random
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_refspec.store.sessions import DATABASE

CONFIG = "config.json"
# Numbers at which types and formats end.
BOUNDARIES = [0, 1, -1, 2, 127, 128, 255, 256, 258, 259, 2**15, 2**16 - 1, 2**16, 2**24]
BOUNDARIES += [2**31 - 2, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**62, 2**63 - 1, 2**63]
BOUNDARIES += [2**64 - 1, 2**64, 10**30]
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
    def around(cls, folder: Path) -> Place:
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

    def config(self) -> Any:
        if not is_plain(self.folder / CONFIG):
            raise ValueError("it is no file any more")
        return json.loads((self.folder / CONFIG).read_bytes())

    def write_config(self, content: Any) -> None:
        (self.folder / CONFIG).write_text(json.dumps(content))


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
    try:
        content = place.config()
    except (ValueError, RecursionError):
        return
    for entry in entries(content):
        if is_plain(file := place.folder / str(entry["name"])):
            data = file.read_bytes()
            entry.update(size=len(data), sha256=hashlib.sha256(data).hexdigest())
    if content:
        place.write_config(content)


# Files as such


def content(place: Place, rng: random.Random) -> str:
    """Flips a bit, overwrites, inserts, deletes or repeats some bytes, or cuts the file."""
    file = place.some_file(rng)
    data = bytearray(file.read_bytes())
    # The header, at the beginning, is hit more often than its share.
    at = rng.randrange(min(len(data), rng.choice([16, 200, len(data)])))
    length = rng.choice([1, 2, 4, 8, 64, 300])
    end = at + length
    packed = struct.pack("<Q", rng.choice(BOUNDARIES) % 2**64)
    filler = bytes([rng.choice([0, 1, 127, 128, 254, 255])])
    width = rng.choice([1, 2, 4, 8])
    aligned = at - at % width
    flipped = bytes([data[at] ^ 1 << rng.randrange(8)])
    changes = {
        "flipped": (at, at + 1, flipped),
        "random": (at, end, rng.randbytes(length)),
        "filled": (at, end, filler * length),
        "number": (aligned, aligned + width, packed[:width]),
        "inserted": (at, at, rng.randbytes(length)),
        "deleted": (at, end, b""),
        "repeated": (at, at, data[at:end]),
        "cut": (rng.choice([0, 1, 7, 8, 9, len(data) // 2, len(data) - 1]), len(data), b""),
        "longer": (len(data), len(data), filler * rng.choice([1, 9, len(data)])),
    }
    [what] = rng.choices(list(changes), [6, 1, 1, 1, 1, 1, 1, 2, 2])
    start, stop, new = changes[what]
    data[start:stop] = new
    file.write_bytes(data)
    return f"{file.name} {what}, {len(new)} bytes from {start} to {stop}"


THINGS = ["folder", "pipe", "socket", "sparse", "unreadable", "missing", "empty", "garbage"]
# Where a writer may write, or a reader look for more.
ADDED = [f".{CONFIG}.new", ".ngrams.safetensors.new", "ngrams.safetensors", "progress.json"]
ADDED += [".tokens-00003.safetensors.new", "tokens-00003.safetensors", f"{DATABASE}-wal"]
ADDED += ["suffixes-00003.safetensors", f"{DATABASE}-shm", f"{DATABASE}-journal", "README.md"]
ADDED += [".lock"]


def put(place: Place, rng: random.Random) -> str:
    """Puts something else in the place of a file, or where there is none."""
    named = sorted(file.name for file in place.folder.iterdir())
    file = place.folder / rng.choice(rng.choice([named, [*ADDED, f".{rng.choice(named)}.new"]]))
    data = file.read_bytes() if is_plain(file) else b""
    file.unlink(missing_ok=True)
    links = {
        "link to a copy": place.outside / file.name,
        "link to itself": file,
        "link to a victim": place.outside / "victim",
        "link to nothing": place.outside / "nothing",
        "link to zeros": Path("/dev/zero"),
        "link to a folder": place.outside,
    }
    what = rng.choice([*THINGS, *links, "hard link to a victim"])
    if what == "link to a copy":
        links[what].write_bytes(data)
    if what in links:
        file.symlink_to(links[what])
    elif what == "hard link to a victim":
        os.link(place.outside / "victim", file)
    elif what == "folder":
        file.mkdir()
        (file / "note").touch()
    elif what == "pipe":
        os.mkfifo(file)
    elif what == "socket":
        os.mknod(file, stat.S_IFSOCK | 0o600)
    elif what != "missing":
        file.write_bytes({"unreadable": data, "garbage": rng.randbytes(200)}.get(what, b""))
        if what == "sparse":
            os.truncate(file, _HUGE)
        elif what == "unreadable":
            file.chmod(0)
    return f"{file.name} is now {what}"


def swapped(place: Place, rng: random.Random) -> str:
    """Exchanges two files, or copies one over the other."""
    one, other = place.some_file(rng), place.some_file(rng)
    first, second = one.read_bytes(), other.read_bytes()
    other.write_bytes(first)
    if rng.random() < 0.5:
        one.write_bytes(second)
    return f"{one.name} and {other.name}"
