"""The documents that a stored folder is built from, read one after another: texts, files, lists of
ids, or the rows of a `datasets` dataset, which are chats, texts, or prompts with completions."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from operator import length_hint
from pathlib import Path
from reprlib import repr as short
from typing import Any, TypeAlias

import numpy as np
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from ..files import open_file, reading
from ..printable import printable

Document: TypeAlias = str | np.ndarray

logger = logging.getLogger("hf_refspec")

_CHAT_COLUMNS = ("messages", "conversations", "conversation", "chat", "data")
_TEXT_COLUMNS = ("text", "content")
_PAIR = ("prompt", "completion")
# The speakers' names in ShareGPT and its relatives.
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant"}
_SAMPLE = 100


@dataclass
class Source:
    """Documents, and what is known about them."""

    documents: Iterator[Document]  # texts, or arrays of checked ids; read once
    name: str  # for people
    license: str | None = None
    total: int | None = None  # of documents
    files: list[Path] | None = None  # the public path of each document, if they are files


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
    kind = type(source).__name__
    is_dataset = hasattr(source, "select_columns")
    if column is not None and not is_dataset:
        raise ValueError(f"column={column!r} is for datasets, but source is a {kind}")
    if is_dataset and isinstance(source, Mapping):
        raise ValueError(
            f"source is a {kind}; choose a split of it: source[...] with one of {list(source)}"
        )
    total = length_hint(source) or None
    if is_dataset:
        info = source.info
        config = "" if (info.config_name or "").startswith("default") else info.config_name
        parts = (info.dataset_name, config, source.split)
        name = " ".join(str(part) for part in parts if part) or "unnamed"
        documents = _checked(_dataset_documents(source, column, tokenizer), vocab_size)
        return Source(documents, name, info.license or None, total)
    paths = [source] if isinstance(source, str | os.PathLike) else source
    if paths is not source or (isinstance(source, list | tuple) and _are_paths(source)):
        return _open_files(paths, pattern)
    if isinstance(source, bytes | Mapping) or not isinstance(source, Iterable):
        raise ValueError(
            f"source must be a dataset, a file or folder, or texts or lists of ids, but is a {kind}"
        )
    return Source(_checked(source, vocab_size), "unnamed", total=total)


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


def _are_paths(documents: list | tuple) -> bool:
    """Whether these are paths of files rather than texts."""
    first = next(iter(documents), None)
    if not isinstance(first, str):
        return isinstance(first, os.PathLike)
    # A text may happen to name a folder, but hardly a file.
    return os.path.isfile(first) or all(isinstance(d, str) and os.path.exists(d) for d in documents)


def _open_files(paths: Iterable[Any], pattern: str) -> Source:
    files: list[Path] = []
    known_as: list[Path] = []
    names = []
    for path in paths:
        if not isinstance(path, str | os.PathLike):
            raise ValueError(f"source is a list of files, but has a {type(path).__name__}")
        found, path = files_of(path, pattern), Path(path)
        names.append(path.resolve().name)
        if not found:
            raise FileNotFoundError(f"the folder {path} has no file that matches {pattern!r}")
        files += found
        # A path that tells its place on this machine is cut to its last part.
        outside = path.is_absolute() or ".." in path.parts
        public = Path(names[-1]) if outside else path
        known_as += [public / file.relative_to(path) for file in found]
    name = ", ".join(names) if len(names) <= 3 else f"{len(names)} files"
    return Source(_read_files(files), name or "unnamed", total=len(files), files=known_as)


def files_of(source: str | os.PathLike[str], pattern: str) -> list[Path]:
    """The file at a path, or the visible files below a folder that match a pattern, sorted. Links
    to folders, which could form a loop, are not followed."""
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
    shown = [file for file in below if not any(part.startswith(".") for part in file.parts)]
    files = (path / file for file in sorted(shown, key=Path.as_posix))
    return [file for file in files if os.path.isfile(file)]


def _read_files(files: list[Path]) -> Iterator[str]:
    damaged: list[Path] = []
    for path in files:
        with open_file(path) as file, reading(path):
            content = file.read()
        text = content.decode("utf-8", errors="replace")
        if text.encode("utf-8") != content:
            damaged.append(path)
        yield text
    if damaged:
        logger.warning(
            "%d of %d files are not valid UTF-8 (the first: %s); invalid bytes were replaced",
            len(damaged),
            len(files),
            printable(damaged[0]),
        )


def _checked(documents: Iterable[Any], vocab_size: int) -> Iterator[Document]:
    """Yields documents that are texts or ids below `vocab_size`, and refuses anything else."""
    damaged = 0
    for number, document in enumerate(documents):
        if not isinstance(document, str):
            yield _checked_ids(document, number, vocab_size)
            continue
        text = document.encode("utf-8", errors="replace").decode("utf-8")
        damaged += text != document
        yield text
    if damaged:
        logger.warning("%d texts are not valid Unicode; invalid characters were replaced", damaged)


def _checked_ids(document: Any, number: int, vocab_size: int) -> np.ndarray:
    try:
        ids = np.asarray(document)
    except (ValueError, TypeError, OverflowError):
        ids = np.empty((), object)
    if ids.shape == (0,) and ids.dtype != object:
        return np.empty(0, np.int64)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(
            f"document {number} must be a text or one list of ids (of a dataset also a chat: "
            "messages with role and content, or from and value), but is a "
            f"{type(document).__name__}: {short(document)}"
        )
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"document {number} has the id {low if low < 0 else high}, but the tokenizer's ids are "
            f"from 0 to {vocab_size - 1}"
        )
    return ids.astype(np.min_scalar_type(vocab_size))


def _dataset_documents(
    dataset: Any, column: str | None, tokenizer: PreTrainedTokenizerBase
) -> Iterator[Any]:
    """The documents of a dataset, in `column` or else in the first of: chats, a text, a prompt and
    its completion. Raises a ValueError if there is no such column, or none can be chosen safely."""
    rows = dataset
    if dataset.features is not None:  # values such as images take time to decode
        features = dataset.features.items()
        plain = [name for name, feature in features if not hasattr(feature, "decode_example")]
        rows = dataset.select_columns(plain)
    sample = list(islice(rows, _SAMPLE))
    # Some streaming datasets have the names of their columns only in their rows.
    names = list(dataset.column_names or (sample[0] if sample else ()))
    if column is not None:
        columns = [column]
        if names and column not in names:
            raise ValueError(f"column={column!r} is not in the dataset; it has {names}")
    else:
        chats = [n for n in _CHAT_COLUMNS if any(_messages(row.get(n)) for row in sample)]
        texts = [name for name in _TEXT_COLUMNS if name in names]
        columns = (chats or texts)[:1] or [name for name in _PAIR if set(_PAIR) <= {*names}]
        if not columns and names:
            raise ValueError(f"which column has the documents? Give column=, one of {names}")
    logger.info("reading the column %s", " and ".join(map(repr, columns)))
    return _read_rows(dataset.select_columns(columns), columns, tokenizer)


def _read_rows(rows: Any, columns: list[str], tokenizer: PreTrainedTokenizerBase) -> Iterator[Any]:
    """Chats are rendered by the tokenizer's chat template. Where it has none, or it refuses a chat,
    each turn is a document, as in the datastores of REST's authors (arXiv 2311.08252)."""
    refused = 0
    for row in rows:
        values = [row[name] for name in columns if row[name] is not None]
        if len({type(value) for value in values}) > 1:
            kinds = " and ".join(type(value).__name__ for value in values)
            raise ValueError(f"a prompt and its completion are {kinds}; give column=, one of them")
        value = values[0] + values[1] if len(values) > 1 else values[0] if values else ""
        messages = _messages(value)
        if messages is None:
            yield value
            continue
        if tokenizer.chat_template is not None:
            try:
                yield str(tokenizer.apply_chat_template(messages, tokenize=False))
                continue
            except (TemplateError, TypeError):  # the assistant begins, a turn is empty, ...
                refused += 1
        yield from (message["content"] or "" for message in messages)
    if refused:
        logger.warning(
            "the tokenizer's chat template refused %d chats; their turns are documents", refused
        )


def _messages(value: Any) -> list[dict[str, Any]] | None:
    """A chat as messages with a role and a content, or `None` if the value is no chat. It may be a
    list of such messages, of ShareGPT's `from` and `value`, or of turns of user and assistant."""
    if not isinstance(value, list) or not value:
        return None
    if all(isinstance(turn, str) for turn in value):
        roles = ("user", "assistant")
        return [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(value)]
    for role, content in (("role", "content"), ("from", "value")):
        if all(isinstance(turn, Mapping) and {role, content} <= turn.keys() for turn in value):
            return [
                {**turn, "role": _ROLES.get(turn[role], turn[role]), "content": turn[content]}
                for turn in value
            ]
    return None
