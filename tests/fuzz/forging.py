"""A stored folder to damage, and config.json, which is made to vouch for what its files become, so
that what reads them is reached."""

from __future__ import annotations

import hashlib
import json
import random
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    def around(cls, root: Path) -> Place:
        """Makes a place around the folder `root / "store"`."""
        place = cls(root / "store", root / "outside", root / "spare")
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
