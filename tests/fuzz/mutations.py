"""Damages stored folders, one after another, and uses each as a user would."""

from __future__ import annotations

import os
import random
import resource
import stat
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from .children import Result, Say, in_children
from .formats import (
    BOUNDARIES,
    CONFIG,
    Place,
    forge,
    mutate_config,
    mutate_database,
    mutate_header,
    mutate_lengths,
    mutate_numbers,
    mutate_sizes,
    mutate_tokenizer,
)
from .outcomes import Outcome, attack, results_of
from .stores import Kind, copied

HUGE = 200 << 30  # of a sparse file, which takes no room
# More than any use of a small folder needs, beside what the process has mapped already.
MEMORY = 2 << 30


def run_all(
    numbers: Sequence[int], root: Path, kinds: Sequence[Kind], seconds: float
) -> Iterator[Result]:
    """Does the mutations of these numbers to folders of some kinds, in an empty folder `root`, and
    yields what becomes of each. Using a damaged folder may take so many seconds."""
    whole = {}
    for kind in kinds:
        kind.build(root / "whole" / kind.name / "store")
        with copied(root / "whole" / kind.name) as path:  # compiles what is compiled at first use
            whole[kind.name] = results_of({**kind.readers, **kind.writers}, Place.around(path))

    def attempt(number: int, say: Say) -> Outcome:
        if resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY:
            mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY, mapped + MEMORY))
        kind = kinds[number % len(kinds)]
        with copied(root / "whole" / kind.name) as path:
            place = Place.around(path)
            say(kind.name, *mutate(place, random.Random(number)))
            return attack(kind.readers, kind.writers, place, whole[kind.name])

    yield from in_children(numbers, attempt, seconds, root / "log")


def mutate(place: Place, generator: random.Random) -> tuple[str, str]:
    """Damages a folder; returns the name of the (last) mutation, and what was done, in words."""
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


def blocks(place: Place, generator: random.Random) -> str:
    """Flips a bit, or overwrites, inserts, deletes or repeats some bytes."""
    file = place.some_file(generator)
    data = bytearray(file.read_bytes())
    # The header, at the beginning, is hit more often than its share.
    at = generator.randrange(min(len(data), generator.choice([16, 200, len(data)])))
    length = generator.choice([1, 2, 4, 8, 64, 300])
    kinds = ["random", "filled", "number", "inserted", "deleted", "repeated"]
    what = generator.choice([*kinds, *["flipped"] * 6])
    if what == "flipped":
        data[at] ^= 1 << generator.randrange(8)
    elif what == "random":
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
    file = place.some_file(generator)
    size = file.stat().st_size
    new = generator.choice([0, 1, 7, 8, 9, size // 2, size - 1, size + 1, size + 9, 2 * size])
    os.truncate(file, new)
    return f"{file.name} of {size} bytes has {new}"


def replaced(place: Place, generator: random.Random) -> str:
    """Puts something else in the place of a file."""
    file = place.some_file(generator)
    what = generator.choice(REPLACEMENTS)
    content = file.read_bytes()
    file.unlink()
    put(file, what, place, content)
    return f"{file.name} is now {what}"


REPLACEMENTS = ["folder", "pipe", "socket", "sparse", "unreadable", "missing", "link to a copy"]
REPLACEMENTS += ["link to itself", "link to a victim", "hard link to a victim", "link to nothing"]
REPLACEMENTS += ["link to zeros", "link to a folder"]


def put(file: Path, what: str, place: Place, content: bytes) -> None:
    """Makes something of any kind at a path where nothing is."""
    links = {
        "link to a copy": place.outside / file.name,
        "link to itself": file,
        "link to a victim": place.outside / "victim",
        "link to nothing": place.outside / "nothing",
        "link to zeros": Path("/dev/zero"),
        "link to a folder": place.outside,
    }
    if what == "link to a copy":
        links[what].write_bytes(content)
    if what in links:
        file.symlink_to(links[what])
    elif what == "hard link to a victim":
        os.link(place.outside / "victim", file)
    elif what == "folder":
        file.mkdir()
    elif what == "pipe":
        os.mkfifo(file)
    elif what == "socket":
        os.mknod(file, stat.S_IFSOCK | 0o600)
    elif what != "missing":
        file.write_bytes(b"" if what == "sparse" else content)
        if what == "sparse":
            os.truncate(file, HUGE)
        elif what == "unreadable":
            file.chmod(0)


def swapped(place: Place, generator: random.Random) -> str:
    """Exchanges two files, or copies one over the other."""
    one, other = place.some_file(generator), place.some_file(generator)
    first, second = one.read_bytes(), other.read_bytes()
    other.write_bytes(first)
    if generator.random() < 0.5:
        one.write_bytes(second)
    return f"{one.name} and {other.name}"


def added(place: Place, generator: random.Random) -> str:
    """Puts a file where a writer may write, or a reader look for more."""
    named = [file.name for file in place.folder.iterdir()]
    file = place.folder / generator.choice([f".{generator.choice(named)}.new", *ADDED])
    file.unlink(missing_ok=True)
    what = generator.choice(list(ADDITIONS))
    put(file, ADDITIONS[what], place, generator.randbytes(200) if what == "garbage" else b"")
    if what == "folder":
        (file / "note").touch()
    return f"{file.name}, {what}"


ADDED = [f".{CONFIG}.new", f".{CONFIG}.new", ".ngrams.safetensors.new", "ngrams.safetensors"]
ADDED += [".tokens-00003.safetensors.new", "progress.json", "tokens-00003.safetensors"]
ADDED += ["suffixes-00003.safetensors", "sessions.sqlite-wal", "sessions.sqlite-shm"]
ADDED += ["sessions.sqlite-journal", "README.md", ".lock"]
ADDITIONS = {each: each for each in ["empty", "garbage", "pipe", "folder", "sparse"]}
ADDITIONS |= {"victim": "link to a victim", "nothing": "link to nothing"}
ADDITIONS |= {"hard link": "hard link to a victim"}

# By name, each with its weight.
MUTATIONS: dict[str, tuple[Callable[[Place, random.Random], str], int]] = {
    "bytes": (blocks, 10),
    "size": (resized, 3),
    "replaced": (replaced, 6),
    "swapped": (swapped, 2),
    "added": (added, 5),
    "config": (mutate_config, 9),
    "tokenizer": (mutate_tokenizer, 2),
    "header": (mutate_header, 5),
    "numbers": (mutate_numbers, 7),
    "lengths": (mutate_lengths, 4),
    "sizes": (mutate_sizes, 3),
    "database": (mutate_database, 9),
}
