"""Reads files of JSON lines; errors name the file and the line."""

from __future__ import annotations

import gzip
import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Record:
    """One line of a file: where it is, for error messages, and its JSON object."""

    where: str
    content: dict[str, Any]

    def text(self, *names: str) -> str:
        """The string at a path of nested keys; `ValueError` if there is none."""
        value: Any = self.content
        for name in names:
            value = value.get(name) if isinstance(value, dict) else None
        if not isinstance(value, str) or not value.strip():
            raise ValueError(f"{self.where}: {'.'.join(names)} must be text, but is {value!r:.80}")
        return value

    def texts(self, name: str) -> list[str]:
        """The strings in the list `name`; `ValueError` if there are none."""
        values = self.content.get(name)
        if not values or not isinstance(values, list) or {*map(type, values)} != {str}:
            raise ValueError(f"{self.where}: {name} must be a list of texts, but is {values!r:.80}")
        return values


def read_records(path: str | Path) -> list[Record]:
    """Reads a file with one JSON object per line, compressed if its name ends in `.gz`."""
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing; benchmarks/README.md says where to get it")
    packed = path.read_bytes()
    try:
        lines = (gzip.decompress(packed) if path.suffix == ".gz" else packed).split(b"\n")
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is damaged: {error}; get it again") from None
    return [
        _record(f"{path}, line {number}", line)
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]


def _record(where: str, line: bytes) -> Record:
    try:
        content = json.loads(line.decode("utf-8-sig"))
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{where} must be a JSON object, but is {line.strip()!r:.80}")
    return Record(where, content)
