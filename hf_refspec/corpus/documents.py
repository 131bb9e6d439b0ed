"""Reads the documents of a stored folder, one after another."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import chain, count, islice
from operator import length_hint
from pathlib import Path
from reprlib import repr as short
from typing import Any

import numpy as np
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from ..messages import counted, require
from ..notebooks import is_hidden
from ..version import __version__
from .rows import (
    ROWS,
    Row,
    dataset_rows,
    kind_of,
    read_content,
    read_rows,
    row_documents,
    row_of,
)
from .tokenise import Document, tokenised, vocabulary_size
from .untrusted import printable

logger = logging.getLogger("hf_refspec")

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


@dataclass
class Source:
    """Documents, and what is known about them."""

    documents: Iterator[Document]  # texts, or arrays of checked ids; read once
    name: str  # for people
    license: str | None = None
    total: int | None = None  # of documents
    names: list[str] | None = None  # of documents that are given with them

    def about(self, corpus_name: str | None, license: str | None) -> dict[str, Any]:
        """The entries of a config.json's `source`; the user's own name and licence come first."""
        about = {"corpus": corpus_name or self.name, "license": license or self.license}
        return about | {"hf_refspec": __version__}

    @contextmanager
    def read_ids(
        self, tokenizer: PreTrainedTokenizerBase, dtype: np.dtype, threads: int, progress: bool
    ) -> Iterator[Iterable[np.ndarray]]:
        """The ids (n,) of each document, see [`tokenised`], below a progress bar."""
        read = tokenised(self.documents, tokenizer, dtype, threads)
        shown = {"desc": "tokenizing", "unit": " documents", "total": self.total}
        with closing(read), tqdm(read, disable=is_hidden(progress), **shown) as bar:
            yield bar


def open_source(
    documents: Any,
    tokenizer: PreTrainedTokenizerBase,
    column: str | None = None,
    pattern: str = "*",
) -> Source:
    """Recognises documents, see [`Datastore.build`]; they are read only when needed.

    `tokenizer` renders chats. Iterating over the documents raises a ValueError for one that is
    neither a text nor ids, or has an id that the tokenizer lacks."""
    name = "unnamed"
    license = names = None
    total = length_hint(documents) or None
    rows: Iterator[Row] | None = None
    if (paths := _paths_in(documents)) is not None:
        files, name = _files(paths, pattern)
        has_rows = any(kind_of(path) in ROWS for path, _ in files)
        total = None if has_rows else len(files)
        if has_rows or column is None:
            rows = _file_rows(files, column)
    elif hasattr(documents, "select_columns"):
        if isinstance(documents, Mapping):
            kind = type(documents).__name__
            raise ValueError(f"documents is a {kind}; choose a split of it, one of {[*documents]}")
        info = documents.info
        config = "" if (info.config_name or "").startswith("default") else info.config_name
        parts = (info.dataset_name, config, documents.split)
        name = " ".join(str(part) for part in parts if part) or name
        license = info.license or None
        rows = dataset_rows(documents, column)
    elif hasattr(documents, "to_frame") or hasattr(documents, "to_dict"):
        frame = documents.to_frame(name="text") if hasattr(documents, "to_frame") else documents
        kind = require("datasets", "a DataFrame or Series", "datastore").Dataset
        read_frame = kind.from_pandas if hasattr(frame, "iloc") else kind.from_polars
        rows = dataset_rows(read_frame(frame), column)
    else:
        if isinstance(documents, Mapping):
            names = [*documents]
            if unfit := next((name for name in names if _CONTROL.search(name)), None):
                raise ValueError(f"the name {unfit!r} of a document has a control character")
            documents = documents.values()
        rest = iter(documents)
        first = [*islice(rest, 1)]
        documents = chain(first, rest)
        if names is None and first and isinstance(first[0], Mapping):
            rows = (row_of(row, column, f"document {i}") for i, row in enumerate(documents))
    if rows is not None:
        found = row_documents(rows, tokenizer)
    elif column is not None:
        raise ValueError(f"column={column!r} is for datasets and files of rows, not for texts")
    else:
        found = zip(documents, names or (f"document {i}" for i in count()), strict=False)
    read = _checked(found, vocabulary_size(tokenizer))
    return Source(read, name, license, total, names)


def _paths_in(documents: Any) -> Sequence[Any] | None:
    """The paths of files, if documents are those rather than texts."""
    if isinstance(documents, str | os.PathLike):
        return [documents]
    if not isinstance(documents, list | tuple) or not documents:
        return None
    first = documents[0]
    if isinstance(first, str) and not os.path.isfile(first):
        # A text may happen to name a folder, but hardly all of them do.
        are_paths = all(isinstance(text, str) and os.path.exists(text) for text in documents)
    else:
        are_paths = isinstance(first, str | os.PathLike)
    return documents if are_paths else None


def _files(paths: Iterable[Any], pattern: str) -> tuple[list[tuple[Path, bool]], str]:
    """The files at paths, each with whether it was named, and the name of all of them together."""
    files: list[tuple[Path, bool]] = []
    names = []
    for path in paths:
        found = files_of(path, pattern)
        path = Path(path)
        if not found:
            raise FileNotFoundError(f"the folder {path} has no file that matches {pattern!r}")
        names.append(path.resolve().name)
        files += [(file, file == path) for file in found]
    return files, (", ".join(names) if len(names) <= 3 else f"{len(names)} files") or "unnamed"


def files_of(source: str | os.PathLike[str], pattern: str) -> list[Path]:
    """The file at a path, or the visible files below a folder that match a pattern, sorted.

    Links to folders, which could form a loop, are not followed, nor links out of the folder or to
    hidden files in it, which would publish whatever a foreign repository links to."""
    path = Path(source)
    if os.path.isfile(source):
        return [path]
    if not os.path.isdir(source):  # unlike the path of "", which is the current folder
        raise FileNotFoundError(
            f"{str(source)[:100]!r} is neither a file nor a folder; name one that is there (a text "
            "itself goes into a list, [text], and the output of a pipe into a file)"
        )
    try:
        below = [file.relative_to(path) for file in path.rglob(pattern)]
    except (ValueError, NotImplementedError) as error:
        raise ValueError(f"pattern {pattern!r} cannot be used: {error}") from error
    folder = Path(os.path.realpath(path))
    files: list[Path] = []
    links: list[Path] = []
    for file in sorted(filter(_is_visible, below), key=Path.as_posix):
        if os.path.isfile(path / file):
            real = Path(os.path.realpath(path / file))
            is_inside = real.is_relative_to(folder) and _is_visible(real.relative_to(folder))
            (files if is_inside else links).append(path / file)
    if links:
        logger.warning(
            "skipped %s in %s that led out of it or to hidden files (the first: %s)",
            counted(len(links), "link"),
            printable(path),
            printable(links[0]),
        )
    return files


def _is_visible(file: Path) -> bool:
    """True if no part of a path in a folder is hidden."""
    return not any(part.startswith(".") for part in file.parts)


def _file_rows(files: list[tuple[Path, bool]], column: str | None) -> Iterator[Row]:
    """The rows of files, see `_files`. A text is one row, and so is a .json or .csv of settings."""
    damaged: list[Path] = []
    for path, is_named in files:
        kind = kind_of(path)
        is_of_rows = kind in ROWS and (is_named or kind in (".jsonl", ".parquet"))
        if is_of_rows or (kind in ROWS and _begins_with_document(path, column)):
            for number, row in read_rows(path, errors="surrogateescape"):
                yield row_of(row, column, f"{printable(path)}, row {number}")
            continue
        content = read_content(path)
        text = content.decode("utf-8", errors="replace")
        if text.encode("utf-8") != content:
            damaged.append(path)
        yield [text], printable(path)
    if damaged:
        logger.warning(
            "replaced invalid bytes in %d of %s, which should be UTF-8 (the first: %s)",
            len(damaged),
            counted(len(files), "file"),
            printable(damaged[0]),
        )


def _begins_with_document(path: Path, column: str | None) -> bool:
    try:
        for _, row in islice(read_rows(path), 1):
            row_of(row, column, "")
            return True
    except ValueError:
        pass
    return False


def _checked(documents: Iterable[tuple[Any, str]], vocab_size: int) -> Iterator[Document]:
    """Yields texts, and ids below `vocab_size`; refuses anything else."""
    damaged = 0
    for document, name in documents:
        if not isinstance(document, str):
            yield _checked_ids(document, name, vocab_size)
            continue
        text = document.encode("utf-8", errors="replace").decode("utf-8")
        damaged += text != document
        yield text
    if damaged:
        logger.warning("replaced invalid characters in %s", counted(damaged, "text"))


def _checked_ids(document: Any, name: str, vocab_size: int) -> np.ndarray:
    try:
        ids = np.asarray(document)
    except (ValueError, TypeError, OverflowError):
        ids = np.empty((), object)
    if ids.shape == (0,) and ids.dtype != object:
        return np.empty(0, np.int64)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(
            f"{name} must be a text or one list of ids (in a row also a chat: "
            "messages with role and content, or from and value), but has the type "
            f"{type(document).__name__}: {short(document)}"
        )
    wrong = ids[(ids < 0) | (ids >= vocab_size)]
    if len(wrong):
        raise ValueError(
            f"{name} has the id {wrong[0]}, but the tokenizer's ids are from 0 to {vocab_size - 1}"
        )
    return ids.astype(np.min_scalar_type(vocab_size))
