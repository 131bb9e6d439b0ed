"""What is done to a stored folder before it is opened: one damage, or a few."""

from __future__ import annotations

import os
import random
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from . import arrays, configs, databases
from .boundaries import BOUNDARIES
from .forging import CONFIG, forge, is_plain

HUGE = 200 << 30  # of a sparse file, which takes no room


@dataclass(frozen=True)
class Place:
    """Where an attack goes on.

    Attributes:
        folder (`Path`): The stored folder.
        outside (`Path`): What nobody may change: a file `victim`, and nothing else.
        spare (`Path`): An empty folder that is written into.
    """

    folder: Path
    outside: Path
    spare: Path

    @classmethod
    def made(cls, root: Path) -> Place:
        """Makes a place around the folder `root / "store"`."""
        place = cls(root / "store", root / "outside", root / "spare")
        place.outside.mkdir()
        place.spare.mkdir()
        (place.outside / "victim").write_text("what is here is somebody else's\n")
        return place


# Returns what was done, in words.
Mutation = Callable[[Place, random.Random], str]


def mutate(place: Place, generator: random.Random) -> tuple[str, str]:
    """Damages a folder.

    Returns:
        The name of the (last) mutation, and what was done, in words.
    """
    last, done = "none", list[str]()
    wanted = generator.choice([1, 1, 1, 1, 2, 3])
    for _ in range(20):
        if len(done) == wanted:
            break
        (name,) = generator.choices(list(MUTATIONS), [weight for _, weight in MUTATIONS.values()])
        try:
            done.append(f"{name}: {MUTATIONS[name][0](place, generator)}")
        except Exception:  # there is no such file, or one before has left nothing of it
            continue
        last = name
        if name != "config" and generator.random() < 0.7:
            forge(place.folder)
            done[-1] += ", forged"
    return last, "; ".join(done)


def some_file(place: Place, generator: random.Random) -> Path:
    """A file of the folder that is still a file."""
    files = [file for file in sorted(place.folder.iterdir()) if is_plain(file)]
    return generator.choice([file for file in files if file.stat().st_size])


def bits(place: Place, generator: random.Random) -> str:
    """Flips some bits; every byte stays where it is."""
    file = some_file(place, generator)
    data = bytearray(file.read_bytes())
    at = [generator.randrange(len(data)) for _ in range(generator.choice([1, 1, 1, 3]))]
    for i in at:
        data[i] ^= 1 << generator.randrange(8)
    file.write_bytes(data)
    return f"bits of {file.name} at {at}"


def blocks(place: Place, generator: random.Random) -> str:
    """Overwrites, inserts, deletes or repeats some bytes."""
    file = some_file(place, generator)
    data = bytearray(file.read_bytes())
    # What stands at the beginning, the header, is worth more attempts than its share.
    at = generator.randrange(min(len(data), generator.choice([16, 200, len(data)])))
    length = generator.choice([1, 2, 4, 8, 64, 300])
    what = generator.choice(["random", "filled", "number", "inserted", "deleted", "repeated"])
    if what == "random":
        data[at : at + length] = generator.randbytes(length)
    elif what == "filled":
        data[at : at + length] = bytes([generator.choice([0, 1, 127, 128, 254, 255])]) * length
    elif what == "number":
        packed = struct.pack("<Q", generator.choice(BOUNDARIES) % 2**64)
        width = generator.choice([1, 2, 4, 8])
        at -= at % width
        data[at : at + width] = packed[:width]
    elif what == "inserted":
        data[at:at] = generator.randbytes(length)
    elif what == "deleted":
        del data[at : at + length]
    else:
        data[at:at] = data[at : at + length]
    file.write_bytes(data)
    return f"{length} bytes of {file.name} {what} at {at}"


def resized(place: Place, generator: random.Random) -> str:
    """Cuts a file short, or makes it longer."""
    file = some_file(place, generator)
    size = file.stat().st_size
    new = generator.choice([0, 1, 7, 8, 9, size // 2, size - 1, size + 1, size + 9, 2 * size])
    os.truncate(file, new)
    return f"{file.name} of {size} bytes has {new}"


def replaced(place: Place, generator: random.Random) -> str:
    """Puts something else in the place of a file."""
    file = some_file(place, generator)
    victim = place.outside / "victim"
    what = generator.choice(REPLACEMENTS)
    content = file.read_bytes()
    file.unlink()
    if what == "folder":
        file.mkdir()
    elif what == "pipe":
        os.mkfifo(file)
    elif what == "socket":
        bind(file)
    elif what == "sparse":
        file.touch()
        os.truncate(file, HUGE)
    elif what == "unreadable":
        file.write_bytes(content)
        file.chmod(0)
    elif what == "hard link to a victim":
        os.link(victim, file)
    elif what == "link to a copy":
        (place.outside / file.name).write_bytes(content)
        file.symlink_to(place.outside / file.name)
    elif what != "missing":
        links = {
            "link to itself": file,
            "link to a victim": victim,
            "link to nothing": place.outside / "nothing",
            "link to zeros": Path("/dev/zero"),
            "link to a folder": place.outside,
        }
        file.symlink_to(links[what])
    return f"{file.name} is now {what}"


REPLACEMENTS = [
    "folder",
    "pipe",
    "socket",
    "sparse",
    "unreadable",
    "missing",
    "link to a copy",
    "link to itself",
    "link to a victim",
    "hard link to a victim",
    "link to nothing",
    "link to zeros",
    "link to a folder",
]


def bind(file: Path) -> None:
    """Makes a socket; the path of one is short, so that it is made from within its folder."""
    before = os.getcwd()
    os.chdir(file.parent)
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(file.name)
    finally:
        os.chdir(before)


def swapped(place: Place, generator: random.Random) -> str:
    """Exchanges two files, or copies one over the other."""
    one, other = some_file(place, generator), some_file(place, generator)
    first, second = one.read_bytes(), other.read_bytes()
    other.write_bytes(first)
    if generator.random() < 0.5:
        one.write_bytes(second)
    return f"{one.name} and {other.name}"


def added(place: Place, generator: random.Random) -> str:
    """Puts a file where a writer may write, or a reader look for more."""
    named = [file.name for file in place.folder.iterdir()]
    names = [
        f".{generator.choice(named)}.new",
        f".{CONFIG}.new",
        f".{CONFIG}.new",
        ".ngrams.safetensors.new",
        "ngrams.safetensors",
        ".tokens-00003.safetensors.new",
        "progress.json",
        "tokens-00003.safetensors",
        "suffixes-00003.safetensors",
        "sessions.sqlite-wal",
        "sessions.sqlite-shm",
        "sessions.sqlite-journal",
        "README.md",
        ".lock",
    ]
    file = place.folder / generator.choice(names)
    file.unlink(missing_ok=True)
    what = generator.choice(ADDITIONS)
    if what == "hard link":
        os.link(place.outside / "victim", file)
    elif what in ("victim", "nothing"):
        file.symlink_to(place.outside / what)
    elif what == "pipe":
        os.mkfifo(file)
    elif what == "folder":
        file.mkdir()
        (file / "note").touch()
    else:
        file.write_bytes(generator.randbytes(200) if what == "garbage" else b"")
        if what == "sparse":
            os.truncate(file, HUGE)
    return f"{file.name}, {what}"


ADDITIONS = ["empty", "garbage", "pipe", "folder", "sparse", "victim", "nothing", "hard link"]


MUTATIONS: dict[str, tuple[Mutation, int]] = {
    "bits": (bits, 5),
    "bytes": (blocks, 5),
    "size": (resized, 3),
    "replaced": (replaced, 6),
    "swapped": (swapped, 2),
    "added": (added, 5),
    "config": (lambda place, generator: configs.mutate(place.folder, generator), 9),
    "tokenizer": (lambda place, generator: configs.mutate_tokenizer(place.folder, generator), 2),
    "header": (lambda place, generator: arrays.mutate_header(place.folder, generator), 5),
    "numbers": (lambda place, generator: arrays.mutate_numbers(place.folder, generator), 7),
    "lengths": (lambda place, generator: arrays.mutate_lengths(place.folder, generator), 4),
    "sizes": (lambda place, generator: arrays.mutate_sizes(place.folder, generator), 3),
    "database": (lambda place, generator: databases.mutate(place.folder, generator), 9),
}
