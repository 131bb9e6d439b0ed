"""The text files of folders."""

from __future__ import annotations

import sys
from pathlib import Path

from ...store.build.source import files_of
from ...store.files import open_file


def text_files(paths: list[Path], pattern: str) -> list[Path]:
    """The files that hold text, in order, without hidden ones; refuses to return none."""
    found: list[Path] = []
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"{path} is neither a file nor a folder")
        found += files_of(path, pattern)
    texts = [path for path in found if _is_text(path)]
    if not texts:
        names = ", ".join(map(str, paths))
        raise FileNotFoundError(
            f"there is no text in {names}: {len(found)} files match --pattern {pattern!r}, none of "
            "them with text"
        )
    if len(texts) < len(found):
        print(f"left out {len(found) - len(texts):,} files without text", file=sys.stderr)
    return texts


def _is_text(path: Path) -> bool:
    with open_file(path) as file:
        head = file.read(1 << 13)
    return bool(head.strip()) and b"\0" not in head
