"""Finds the text files of folders."""

from __future__ import annotations

import sys
from pathlib import Path


def text_files(paths: list[Path], pattern: str) -> list[Path]:
    """The files that hold text, in order, without hidden ones.

    Raises:
        FileNotFoundError: If a path does not exist, or there is no such file.
        ValueError: If the pattern is not valid.
    """
    found: list[Path] = []
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"{path} is neither a file nor a folder")
        found += [path] if path.is_file() else _files_below(path, pattern)
    texts = [path for path in found if _is_text(path)]
    if not texts:
        names = ", ".join(map(str, paths))
        raise FileNotFoundError(
            f"there is no text in {names}: {len(found)} files match --pattern {pattern!r}, and "
            "none of them has text in it"
        )
    if len(texts) < len(found):
        print(f"left out {len(found) - len(texts):,} files that have no text", file=sys.stderr)
    return texts


def _files_below(folder: Path, pattern: str) -> list[Path]:
    try:
        below = [path.relative_to(folder) for path in folder.rglob(pattern) if path.is_file()]
    except (ValueError, NotImplementedError) as error:
        raise ValueError(f"--pattern {pattern!r} cannot be used: {error}") from error
    shown = [path for path in below if not any(part.startswith(".") for part in path.parts)]
    return [folder / path for path in sorted(shown, key=Path.as_posix)]


def _is_text(path: Path) -> bool:
    with path.open("rb") as file:
        head = file.read(1 << 13)
    return bool(head.strip()) and b"\0" not in head
