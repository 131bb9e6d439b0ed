"""`hf-refspec store build --watch`: a datastore that follows a folder or git work tree."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

from transformers import PreTrainedTokenizerBase

from ...store.build.source import files_of
from ...store.datastore import Datastore
from ...store.printable import printable

_SECONDS = 0.5  # between two looks at the folder


def watch(
    folder: Path, tokenizer: PreTrainedTokenizerBase, out: Path, *, pattern: str, **options: Any
) -> Iterator[Datastore]:
    """Builds a datastore of a folder's texts, named by their paths, or goes on with one; then adds,
    replaces and removes what has changed, without an end. Yields it after each change.

    `options` are those of [`Datastore.build`]."""
    store = Datastore(out, "full", tokenizer) if out.exists() else None
    before: dict[str, Any] = dict.fromkeys(store.names if store else (), "unknown")
    own, trouble = Path(os.path.relpath(out, folder)).as_posix() + "/", ""
    while True:
        try:
            now = {name: at for name, at in _files(folder, pattern) if not name.startswith(own)}
        except (FileNotFoundError, NotADirectoryError):
            if not folder.is_dir():
                raise
            continue  # a folder in it was deleted while it was listed
        began = perf_counter()
        names = sorted(name for name in before.keys() | now if now.get(name) != before.get(name))
        texts = {name: _text(folder / name) if name in now else "" for name in names}
        try:
            if store is not None and texts:
                store.add(texts, tokenizer, progress=False)
        except ValueError as error:  # another process is writing, or no text is left
            if str(error) != trouble:
                print(f"{error}; trying again", flush=True)
            now, texts, trouble = before, {}, str(error)
        if store is None and any(texts.values()):
            store = Datastore.build(texts, tokenizer, out, corpus=folder.name, **options)
        if store is not None and texts:
            listed = ", ".join(map(printable, names[:3])) + (", ..." if len(names) > 3 else "")
            seconds = perf_counter() - began
            print(f"{len(names):,} changed, {seconds:.2f} s: {listed}", flush=True)
            trouble = ""
            yield store
        before = now
        sleep(_SECONDS)


def _files(folder: Path, pattern: str) -> Iterator[tuple[str, tuple[int, int]]]:
    """The visible files of a folder, in a git work tree those that git does not ignore, each with
    what changes when it is written."""
    git = shutil.which("git") or "false"
    listing = [git, "-C", str(folder), "ls-files", "-coz", "--exclude-standard"]
    listed = subprocess.run(listing, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False)
    kept = {*os.fsdecode(listed.stdout).split("\0")}
    for file in files_of(folder, pattern):
        name = file.relative_to(folder).as_posix()
        if listed.returncode or name in kept:
            with suppress(OSError):
                yield name, (file.stat().st_mtime_ns, file.stat().st_size)


def _text(file: Path) -> str:
    """A file's text; none of a file that is gone, or is no text."""
    with suppress(OSError, UnicodeDecodeError):
        return file.read_bytes().decode()  # with its ends of lines
    return ""
