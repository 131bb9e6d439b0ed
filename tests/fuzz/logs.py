"""Damages the logs of a retrieval cache, and writes records into them that are sound as such."""

from __future__ import annotations

import random
import struct
import zlib
from pathlib import Path

import numpy as np

from hf_refspec.drafting.sessions.log import SessionLog

from .boundaries import BOUNDARIES
from .forging import is_plain


def mutate(folder: Path, generator: random.Random) -> str:
    """Adds a hostile record to a log, or changes the order of the logs."""
    logs = [file for file in sorted(folder.glob("log-*")) if is_plain(file)]
    log = generator.choice(logs)
    what = generator.choice(["record", "record", "lengths", "renumbered", "repeated", "cut"])
    content = log.read_bytes()
    if what == "record":
        append(log, *hostile_call(generator))
    elif what == "lengths":
        record = record_of_lengths(generator)
        log.write_bytes(content + record if generator.random() < 0.5 else record + content)
    elif what == "renumbered":
        log.rename(folder / f"log-{generator.choice([0, 1, 9, 13, 16, 40, 10**12]):05d}")
    elif what == "repeated":
        log.write_bytes(content * generator.choice([2, 50]))
    else:
        log.write_bytes(content[generator.randrange(len(content)) :])
    return f"{what} in {log.name}"


def append(log: Path, prompt: np.ndarray, output: np.ndarray) -> None:
    """Appends a call as the cache writes it, unchecked."""
    other = log.with_name("record")
    writer = SessionLog(other)
    writer.append(prompt, output)
    writer.close()
    with open(log, "ab") as file:
        file.write(other.read_bytes())
    other.unlink()


def hostile_call(generator: random.Random) -> tuple[np.ndarray, np.ndarray]:
    """A prompt and an output such as no model has."""
    call = []
    for _ in range(2):
        number = generator.choice([each for each in BOUNDARIES if -1 <= each < 2**31])
        length = generator.choice([0, 1, 1, 3, 100, 300_000])
        call.append(np.full(length, number, dtype=np.int64))
    return call[0], call[1]


def record_of_lengths(generator: random.Random) -> bytes:
    """A record of format 1 whose lengths are not those of what follows, with a right checksum."""
    lengths = struct.pack("<II", *(generator.choice(BOUNDARIES) % 2**32 for _ in range(2)))
    ids = np.arange(generator.choice([0, 1, 8]), dtype="<i4").tobytes()
    return lengths + struct.pack("<I", zlib.crc32(ids, zlib.crc32(lengths))) + ids
