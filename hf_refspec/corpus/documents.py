"""The documents that a stored folder is built from, read one after another: texts, lists of ids,
files of texts, or the rows of files, frames and datasets, which are chats, texts, or prompts with
completions."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count, islice
from operator import length_hint
from pathlib import Path
from reprlib import repr as short
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from ...counted import counted
from ..printable import printable
from .chats import messages_of, with_texts
from .rows import ROWS, check_names, kind_of, read_content, read_rows

Document: TypeAlias = str | np.ndarray
# A row, its columns that are a document, and its name for people.
_Row: TypeAlias = tuple[Mapping[str, Any], list[str], str]

logger = logging.getLogger("hf_refspec")

_CHAT_COLUMNS = ("messages", "conversations", "conversation", "chat", "data")
_TEXT_COLUMNS = ("text", "content")
_PAIR = ("prompt", "completion")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_SAMPLE = 100
_BATCH = 1000


class _File(NamedTuple):
    path: Path
    public: Path  # of an absolute path only the last part and what is below it
    is_named: bool  # rather than found in a folder


@dataclass
class Source:
    """Documents, and what is known about them."""

    documents: Iterator[Document]  # texts, or arrays of checked ids; read once
    name: str  # for people
    license: str | None = None
    total: int | None = None  # of documents
    names: list[str] | None = None  # of documents that are given with them


def open_source(
    documents: Any,
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int,
    column: str | None = None,
    pattern: str = "*",
    places: list[str] | None = None,
) -> Source:
    """Recognises documents, see [`Datastore.build`]; they are read only when needed.

    `tokenizer` renders chats. Iterating over the documents raises a ValueError for one that is
    neither a text nor ids, or has an id that is not below `vocab_size`. Documents of files add to
    `places`, as they are read, where they are from: a public path, and the row if it has some."""

    def of_rows(rows: Iterable[_Row], places: list[str] | None = None) -> Iterator[Document]:
        return _checked(_read_rows(rows, tokenizer), vocab_size, places)

    kind = type(documents).__name__
    total = length_hint(documents) or None
    if hasattr(documents, "select_columns"):
        if isinstance(documents, Mapping):
            splits = [*documents]
            raise ValueError(f"documents is a {kind}; choose a split of it, one of {splits}")
        info = documents.info
        config = "" if (info.config_name or "").startswith("default") else info.config_name
        parts = (info.dataset_name, config, documents.split)
        name = " ".join(str(part) for part in parts if part) or "unnamed"
        rows = _dataset_rows(documents, column)
        return Source(of_rows(rows), name, info.license or None, total)
    if (paths := _paths_in(documents)) is not None:
        files, name = _files(paths, pattern)
        has_rows = any(kind_of(file.path) in ROWS for file in files)
        if column is not None and not has_rows:
            raise ValueError(f"column={column!r} is for datasets and files of rows, not for {name}")
        total = None if has_rows else len(files)
        return Source(of_rows(_file_rows(files, column), places), name, total=total)
    if hasattr(documents, "to_frame"):  # a Series of pandas or polars
        documents = documents.to_frame(name="text")
    if hasattr(documents, "columns") and hasattr(documents, "to_dict"):  # a DataFrame of them
        kind = f"the {type(documents).__name__}"
        check_names(documents.columns, kind)
        rows = _mapping_rows(_frame_rows(documents), column, kind)
        return Source(of_rows(rows), "unnamed", total=total)
    names = None
    if isinstance(documents, Mapping) and all(isinstance(name, str) for name in documents):
        names = [*documents]
        if unfit := next((name for name in names if _CONTROL.search(name)), None):
            raise ValueError(f"the name {unfit!r} of a document has a control character")
        documents = documents.values()
    is_scalar = getattr(documents, "ndim", 1) == 0  # an array without a length
    if is_scalar or isinstance(documents, bytes | Mapping) or not isinstance(documents, Iterable):
        raise ValueError(
            "documents must be a dataset, a file or folder, rows, texts or lists of ids, but has "
            f"the type {kind}"
        )
    rest = iter(documents)
    first = [*islice(rest, 1)]
    documents = chain(first, rest)
    if names is None and first and isinstance(first[0], Mapping):
        return Source(of_rows(_mapping_rows(documents, column)), "unnamed", total=total)
    if column is not None:
        raise ValueError(
            f"column={column!r} is for datasets and files of rows, not for the type {kind}"
        )
    named = zip(documents, names or (f"document {i}" for i in count()), strict=False)
    return Source(_checked(named, vocab_size), "unnamed", total=total, names=names)


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
            batch = []
            size = 0
        batch.append(document)
        size += len(document)
    if batch:
        yield batch


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


def _files(paths: Iterable[Any], pattern: str) -> tuple[list[_File], str]:
    """The files at paths, and the name of all of them together."""
    files: list[_File] = []
    names = []
    for path in paths:
        if not isinstance(path, str | os.PathLike):
            raise ValueError(
                f"documents is a list of files, but one has the type {type(path).__name__}"
            )
        found = files_of(path, pattern)
        path = Path(path)
        if not found:
            raise FileNotFoundError(f"the folder {path} has no file that matches {pattern!r}")
        name = path.resolve().name
        names.append(name)
        is_outside = path.is_absolute() or ".." in path.parts
        public = Path(name) if is_outside else path
        files += [_File(file, public / file.relative_to(path), file == path) for file in found]
    return files, (", ".join(names) if len(names) <= 3 else f"{len(names)} files") or "unnamed"


def files_of(source: str | os.PathLike[str], pattern: str) -> list[Path]:
    """The file at a path, or the visible files below a folder that match a pattern, sorted. Links
    to folders, which could form a loop, are not followed, nor links out of the folder or to hidden
    files in it, which would publish whatever a foreign repository links to."""
    path = Path(source)
    if os.path.isfile(source):
        return [path]
    if not os.path.isdir(source):  # unlike the path of "", which is the current folder
        raise FileNotFoundError(
            f"{str(source)[:100]!r} is neither a file nor a folder; put a text into a list, "
            "[text], and the output of a pipe into a file"
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
    """Whether no part of a path in a folder is hidden."""
    return not any(part.startswith(".") for part in file.parts)


def _file_rows(files: list[_File], column: str | None) -> Iterator[_Row]:
    """The rows of files. A text is one row, and so is a .json or .csv file of settings."""
    damaged: list[Path] = []
    for path, public, is_named in files:
        kind = kind_of(path)
        is_of_rows = kind in ROWS and (is_named or kind in (".jsonl", ".parquet"))
        if is_of_rows or (kind in ROWS and _begins_with_document(path, column)):
            for number, row in read_rows(path, errors="surrogateescape"):
                place = f"{printable(public)}, row {number}"
                yield row, _columns_of(row, column, place), place
            continue
        content = read_content(path)
        text = content.decode("utf-8", errors="replace")
        if text.encode("utf-8") != content:
            damaged.append(path)
        yield {"text": text}, ["text"], str(public)
    if damaged:
        logger.warning(
            "replaced invalid bytes in %d of %s, which should be UTF-8 (the first: %s)",
            len(damaged),
            counted(len(files), "file"),
            printable(damaged[0]),
        )


def _begins_with_document(path: Path, column: str | None) -> bool:
    try:
        return any(_columns_of(row, column, "") for _, row in islice(read_rows(path), 1))
    except ValueError:
        return False


def _columns_of(row: Any, column: str | None, place: str) -> list[str]:
    """The columns of a row that are its document; rows may differ in them."""
    row = row if isinstance(row, Mapping) else {}
    filled = {name: value for name, value in row.items() if not _is_empty(value)}
    empty_chats = [name for name in _CHAT_COLUMNS if name in row and name not in filled]
    found = _chosen([*filled], [filled]) or _chosen([*row], [row]) or empty_chats[:1]
    return _valid(found, column, [*row], place)


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str | list | np.ndarray) and len(value) == 0)


def _valid(found: list[str], column: str | None, names: list[str], place: str) -> list[str]:
    """`column`, or else the columns that were found; raises a ValueError if there are none."""
    if column is None and not found:
        raise ValueError(f"{place}: which column has the documents? Give column=, one of {names}")
    if column is not None and column not in names:
        raise ValueError(f"column={column!r} is not in {place}; it has {names}")
    return found if column is None else [column]


def _checked(
    documents: Iterable[tuple[Any, str]], vocab_size: int, places: list[str] | None = None
) -> Iterator[Document]:
    """Yields texts, and ids below `vocab_size`; refuses anything else. Adds names to `places`."""
    damaged = 0
    for document, name in documents:
        if places is not None:
            places.append(name)
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


def _dataset_rows(dataset: Any, column: str | None) -> Iterator[_Row]:
    """The rows of a dataset; their columns are chosen by the first ones, and alone decoded."""
    rows = dataset
    if dataset.features is not None:  # values such as images take time to decode
        features = dataset.features.items()
        plain = [name for name, feature in features if not hasattr(feature, "decode_example")]
        rows = dataset.select_columns(plain)
    sample = list(islice(rows, _SAMPLE))
    # Some streaming datasets have the names of their columns only in their rows.
    names = list(dataset.column_names or (sample[0] if sample else ()))
    columns = [column] if column else []
    if names:
        columns = _valid(_chosen(names, sample), column, names, "the dataset")
    logger.info("reading the column %s", " and ".join(map(repr, columns)))
    kept = enumerate(dataset.select_columns(columns))
    return ((row, columns, f"document {i}") for i, row in kept)


def _frame_rows(frame: Any) -> Iterator[dict[str, Any]]:
    """The rows of a DataFrame of pandas or polars, some of them at a time."""
    places = getattr(frame, "iloc", frame)  # pandas may slice by labels
    for begin in range(0, len(frame), _BATCH):
        part = places[begin : begin + _BATCH]
        if hasattr(part, "notna"):  # pandas has several values for what is missing
            part = part.astype(object).where(part.notna(), None)
        for row in zip(*(part[name].to_list() for name in part.columns), strict=True):
            yield dict(zip(part.columns, row, strict=True))


def _mapping_rows(
    rows: Iterable[Mapping[str, Any]], column: str | None, kind: str | None = None
) -> Iterator[_Row]:
    """Rows that are not from a file, which may differ in their columns."""
    for number, row in enumerate(rows):
        place = f"document {number}"
        yield row, _columns_of(row, column, kind or place), place


def _chosen(names: list[str], sample: list[Any]) -> list[str]:
    """The columns that are documents: chats, a text, or a prompt and its completion, if any."""
    chats = [n for n in _CHAT_COLUMNS if any(messages_of(row.get(n)) for row in sample)]
    texts = [name for name in _TEXT_COLUMNS if name in names]
    return (chats or texts)[:1] or [name for name in _PAIR if set(_PAIR) <= {*names}]


def _read_rows(
    rows: Iterable[_Row], tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[Any, str]]:
    """The documents of rows, and their names. Chats are rendered by the tokenizer's chat template.
    Where it has none, or it refuses a chat, each turn is a document, as in the datastores of REST's
    authors (arXiv 2311.08252)."""
    refused = skipped = 0
    for row, columns, place in rows:
        values = [row[name] for name in columns if row[name] is not None]
        value = values[0] if values else ""
        if len(values) > 1:  # a prompt and its completion
            if type(value) is not type(values[1]):
                kinds = f"{type(value).__name__} and {type(values[1]).__name__}"
                raise ValueError(f"{place}: prompt and completion are {kinds}; name one by column=")
            value = value + values[1]
        chat = messages_of(value)
        if chat is None:
            yield value, place
            continue
        messages, others = with_texts(chat, place)
        skipped += others
        if tokenizer.chat_template is not None:
            try:
                yield str(tokenizer.apply_chat_template(messages, tokenize=False)), place
                continue
            except (TemplateError, TypeError):  # the assistant begins, a turn is empty, ...
                refused += 1
        yield from ((message["content"] or "", place) for message in messages)
    if refused:
        logger.warning(
            "the tokenizer's chat template refused %s; each turn is a document instead",
            counted(refused, "chat"),
        )
    if skipped:
        logger.warning("skipped %s without text", counted(skipped, "message part"))
