"""The documents that a stored folder is built from, read one after another."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from transformers import PreTrainedTokenizerBase

from ..files import open_file, unreadable
from ..printable import printable
from .dataset_documents import DatasetDocuments

Document: TypeAlias = str | np.ndarray

logger = logging.getLogger("hf_refspec")


@dataclass
class Source:
    """Documents, and what is known about them.

    Attributes:
        documents (`Iterator[str | np.ndarray]`): Texts, or arrays of checked ids; read once.
        name (`str`): For people.
        license (`str`, *optional*): If the source names one.
        total (`int`, *optional*): The number of documents, if it is known.
        files (`list[Path]`, *optional*): The public path of each document, if they are files, see
            `_shown`.
    """

    documents: Iterator[Document]
    name: str
    license: str | None = None
    total: int | None = None
    files: list[Path] | None = None


def open_source(
    source: Any,
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int,
    column: str | None = None,
    pattern: str = "*",
) -> Source:
    """Recognises a source, see [`build_store`]; its documents are read only when needed.

    `tokenizer` renders chats. Iterating over the documents raises a ValueError for one that is
    neither a text nor ids, or has an id that is not below `vocab_size`."""
    kind = _dataset_kind(source)
    if kind is None and column is not None:
        raise ValueError(
            f"column={column!r} is for datasets, but source is a {type(source).__name__}"
        )
    if kind in ("DatasetDict", "IterableDatasetDict"):
        raise ValueError(
            f"source is a {kind}; choose a split of it: source[...] with one of {list(source)}"
        )
    if kind is not None:
        rows = DatasetDocuments(source, column, tokenizer)
        total = len(source) if kind == "Dataset" else None
        info = source.info
        config = "" if (info.config_name or "").startswith("default") else info.config_name
        parts = (info.dataset_name, config, source.split)
        name = " ".join(str(part) for part in parts if part) or "unnamed"
        return Source(checked(rows, vocab_size), name, info.license or None, total)
    if isinstance(source, str | os.PathLike):
        return _open_files([source], pattern)
    if isinstance(source, list | tuple) and _are_paths(source):
        return _open_files(source, pattern)
    if isinstance(source, bytes | Mapping) or not isinstance(source, Iterable):
        raise ValueError(
            "source must be a dataset, a file or folder, or texts or lists of ids, "
            f"but is a {type(source).__name__}"
        )
    total = len(source) if isinstance(source, list | tuple) else None
    return Source(checked(source, vocab_size), "unnamed", total=total)


def batches(
    documents: Iterable[Document], most_characters: int = 1 << 18, most_documents: int = 1 << 12
) -> Iterator[list[Document]]:
    """Groups documents into batches of about the same work."""
    batch: list[Document] = []
    size = 0
    for document in documents:
        full = len(batch) == most_documents or size + len(document) > most_characters
        if batch and full:
            yield batch
            batch, size = [], 0
        batch.append(document)
        size += len(document)
    if batch:
        yield batch


def _dataset_kind(source: Any) -> str | None:
    """The name of the `datasets` class that `source` is of, without importing the library."""
    library = sys.modules.get("datasets")
    kinds = ("Dataset", "IterableDataset", "DatasetDict", "IterableDatasetDict")
    found = (each for each in kinds if library and isinstance(source, getattr(library, each)))
    return next(found, None)


def _are_paths(documents: list | tuple) -> bool:
    """Whether these are paths of files rather than texts."""
    if any(isinstance(document, os.PathLike) for document in documents[:1]):
        return True
    if not documents or not isinstance(documents[0], str) or not _exists(documents[0]):
        return False
    # A text may happen to name a folder, but hardly a file.
    return os.path.isfile(documents[0]) or all(map(_exists, documents))


def _exists(path: Any) -> bool:
    try:
        return path != "" and Path(path).exists()
    except (OSError, ValueError, TypeError):  # the name is too long, has a null byte, or is no name
        return False


def _open_files(paths: Iterable[Any], pattern: str) -> Source:
    files: list[Path] = []
    known_as: list[Path] = []
    names = []
    for path in paths:
        if not isinstance(path, str | os.PathLike):
            raise ValueError(f"source is a list of files, but has a {type(path).__name__}")
        if not _exists(path):
            shown = str(path) if len(str(path)) < 100 else f"{str(path)[:100]}..."
            raise FileNotFoundError(
                f"source {shown!r} is neither a file nor a folder; a text goes into a list: [text]"
            )
        path = Path(path)
        names.append(path.resolve().name)
        found = files_of(path, pattern)
        if not found:
            raise FileNotFoundError(f"the folder {path} has no file that matches {pattern!r}")
        files += found
        known_as += [_shown(path) / file.relative_to(path) for file in found]
    name = ", ".join(names) if len(names) <= 3 else f"{len(names)} files"
    return Source(_read_files(files), name or "unnamed", total=len(files), files=known_as)


def _shown(path: Path) -> Path:
    """A path as it was given, or only its last part if that tells where on this machine it is."""
    outside = path.is_absolute() or ".." in path.parts
    return Path(path.resolve().name) if outside else path


def files_of(path: Path, pattern: str) -> list[Path]:
    """The file at a path, or the visible files below a folder that match a pattern, sorted. Links
    to folders, which could form a loop, are not followed."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ValueError(
            f"{printable(path)} is neither a file nor a folder, but a pipe or a device; write what "
            "comes out of it into a file"
        )
    try:
        below = [file.relative_to(path) for file in path.rglob(pattern)]
    except (ValueError, NotImplementedError) as error:
        raise ValueError(f"pattern {pattern!r} cannot be used: {error}") from error
    shown = [file for file in below if not any(part.startswith(".") for part in file.parts)]
    files = (path / file for file in sorted(shown, key=Path.as_posix))
    return [file for file in files if os.path.isfile(file)]


def _read_files(files: list[Path]) -> Iterator[str]:
    damaged: list[Path] = []
    for path in files:
        try:
            with open_file(path) as file:
                content = file.read()
            try:
                text = content.decode("utf-8")
            except UnicodeDecodeError:
                damaged.append(path)
                text = content.decode("utf-8", errors="replace")
        except MemoryError as error:
            raise unreadable(path, error) from None
        yield text
    if damaged:
        logger.warning(
            "%d of %d files are not valid UTF-8 (the first: %s); invalid bytes were replaced",
            len(damaged),
            len(files),
            printable(damaged[0]),
        )


def checked(documents: Iterable[Any], vocab_size: int) -> Iterator[Document]:
    """Yields documents that are texts or ids below `vocab_size`, and refuses anything else."""
    damaged = 0
    for number, document in enumerate(documents):
        if not isinstance(document, str):
            yield _checked_ids(document, number, vocab_size)
            continue
        try:
            document.encode("utf-8")
        except UnicodeEncodeError:
            damaged += 1
            document = document.encode("utf-8", errors="replace").decode("utf-8")
        yield document
    if damaged:
        logger.warning("%d texts are not valid Unicode; invalid characters were replaced", damaged)


def _checked_ids(document: Any, number: int, vocab_size: int) -> np.ndarray:
    if isinstance(document, bytes | Mapping) or not hasattr(document, "__len__"):
        raise ValueError(
            f"document {number} must be a text or a list of ids, but is a {type(document).__name__}"
        )
    try:
        ids = np.asarray(document)
    except (ValueError, TypeError, OverflowError):
        ids = np.empty(0, object)
    if ids.shape == (0,) and ids.dtype != object:
        return np.empty(0, np.int64)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(f"document {number} must be a text or one list of integers")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"document {number} has the id {low if low < 0 else high}, but the tokenizer's ids are "
            f"from 0 to {vocab_size - 1}"
        )
    return ids.astype(np.min_scalar_type(vocab_size))
