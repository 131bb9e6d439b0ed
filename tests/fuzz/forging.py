"""Makes config.json vouch for what its files have become, so that what reads them is reached."""

from __future__ import annotations

import hashlib
import json
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CONFIG = "config.json"
_LARGEST_READ = 1 << 24


def entries(content: Any) -> Iterator[dict[str, Any]]:
    """All entries of files in a config, at any depth."""
    if isinstance(content, dict):
        if {"name", "size", "sha256"} <= content.keys():
            yield content
        content = list(content.values())
    if isinstance(content, list):
        for each in content:
            yield from entries(each)


def is_plain(file: Path) -> bool:
    """Whether it is a file with a content that can be damaged: some have become something else."""
    try:
        about = file.lstat()
    except (OSError, ValueError):
        return False
    return stat.S_ISREG(about.st_mode) and about.st_size < _LARGEST_READ


def forge(folder: Path) -> None:
    """Writes the sizes and checksums that the files have into config.json, if that can be read."""
    try:
        content = json.loads((folder / CONFIG).read_bytes()) if is_plain(folder / CONFIG) else {}
    except (ValueError, RecursionError):
        return
    for entry in entries(content):
        vouch(folder, entry)
    if content:
        write_config(folder, content)


def vouch(folder: Path, entry: dict[str, Any]) -> None:
    """Makes an entry say the size and the checksum that its file has."""
    file = folder / str(entry["name"])
    if is_plain(file):
        content = file.read_bytes()
        entry.update(size=len(content), sha256=hashlib.sha256(content).hexdigest())


def write_config(folder: Path, content: Any) -> None:
    """Writes a config.json, whatever it says."""
    (folder / CONFIG).write_text(json.dumps(content))
