"""Rows of files, frames and datasets, and their documents: chats, texts, prompts with answers."""

from __future__ import annotations

import csv
import gzip
import io
import json
import logging
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, TextIO, TypeAlias

import numpy as np
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from ..messages import counted, require
from .untrusted import DatastoreError, one_line, open_file, printable

# The values of a row's columns that are a document, and its name for people.
Row: TypeAlias = tuple[list[Any], str]

logger = logging.getLogger("hf_refspec")

ROWS = (".jsonl", ".json", ".csv", ".parquet")
_CHAT_COLUMNS = ("messages", "conversations", "conversation", "chat", "data")
_TEXT_COLUMNS = ("text", "content")
_PAIR = ("prompt", "completion")
# Errors that chat templates raise about chats that they do not take: the assistant begins, ...
REFUSALS = (TemplateError, TypeError, ArithmeticError, LookupError)
# The speakers' names in ShareGPT and its relatives.
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant"}
_SAMPLE = 100  # rows by which the columns of a dataset are chosen
_BATCH = 128  # rows of Parquet or of a frame that are converted at a time
_BLOCK = 1 << 20  # bytes of a text that are read at a time
# Bytes or characters of a text or row, which a small .gz file could hold any number of.
LARGEST = 1 << 28
_TOO_LARGE = f"is longer than {LARGEST:,} bytes or characters; cut it into several documents"


def kind_of(path: Path) -> str:
    """The ending of a file's name before .gz: `".jsonl"` of `data.JSONL.gz`."""
    return Path(path.name.lower().removesuffix(".gz")).suffix


@contextmanager
def open_content(path: Path) -> Iterator[Any]:
    """Opens a file for reading, decompressed if its name ends in .gz; raises as [`open_file`]."""
    with open_file(path) as file:
        try:
            yield gzip.GzipFile(fileobj=file) if path.suffix.lower() == ".gz" else file
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DatastoreError(f"{path} is damaged: {one_line(error)}") from None


def read_content(path: Path) -> bytes:
    """All of a file; raises as [`open_content`], or a ValueError if it is too large."""
    content = bytearray()
    with open_content(path) as file:
        while part := file.read(_BLOCK):
            content += part
            if len(content) > LARGEST:
                raise ValueError(f"{printable(path)} {_TOO_LARGE}")
    return bytes(content)


def read_rows(path: Path, errors: str = "strict") -> Iterator[tuple[int, Any]]:
    """The rows of a file, numbered from 1; JSON lines, the default, have the numbers of lines.

    Invalid UTF-8 is treated by `errors`, as in `open`. Raises a ValueError that names the file and
    the row, or its line in .json, if it is not of its kind."""
    kind = kind_of(path) if kind_of(path) in ROWS else ".jsonl"
    number = 0
    with open_content(path) as file:
        try:
            if kind == ".parquet":
                parquet = require("pyarrow.parquet", str(path), "datastore").ParquetFile(file)
                check_names(parquet.schema_arrow.names, "the file")
                batches = parquet.iter_batches(_BATCH)
                rows: Iterable[Any] = (row for batch in batches for row in batch.to_pylist())
            elif kind == ".json":
                rows = _json_rows(path, errors)
            else:
                text = io.TextIOWrapper(file, "utf-8-sig", errors, newline="")
                rows = _csv_rows(text) if kind == ".csv" else _json_lines(text)
            for number, row in enumerate(rows, 1):
                if row is not None:
                    yield number, row
        except (ValueError, TypeError, LookupError, RuntimeError, csv.Error) as error:
            place = f"row {number + 1} is not valid {kind}"
            reason = one_line(error)
            if isinstance(error, json.JSONDecodeError):
                reason = f"{error.msg.removesuffix(' at')} at column {error.colno}"
                if kind == ".json" and number == 0:  # all of the file
                    place = f"line {error.lineno} is not valid {kind}"
            if kind_of(path) not in ROWS:
                reason += f"; {', '.join(ROWS)} and these with .gz are read, any other as .jsonl"
            raise ValueError(f"{printable(path)}, {place}: {reason}") from None


def check_names(names: Iterable[Any], kind: str) -> None:
    """Refuses columns of which two have one name; those without a name do not count."""
    for name, times in Counter(names).items():
        if times > 1 and name:
            raise ValueError(f"{kind} has {times} columns {name!r}; rename one")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        check_names([name for name, _ in pairs], "an object")
    return found


def _lines(file: TextIO) -> Iterator[str]:
    while line := file.readline(LARGEST + 1):
        if len(line) > LARGEST:
            raise ValueError(f"it {_TOO_LARGE}")
        yield line


def _json_lines(file: TextIO) -> Iterator[Any]:
    for line in _lines(file):
        yield None if line.isspace() else json.loads(line, object_pairs_hook=_object)


def _json_rows(path: Path, errors: str) -> Iterator[Any]:
    """The elements of an array, one value, or JSON lines, which some name .json.

    All of the file is read first, by Python's own module: `datasets` makes dates of some texts, and
    JSON of a column that has texts in one row and lists in another."""
    text = read_content(path).decode("utf-8-sig", errors)
    try:
        values = json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        if error.msg != "Extra data":
            raise
        yield from _json_lines(io.StringIO(text))
    else:
        yield from values if isinstance(values, list) else [values]


def _csv_rows(file: TextIO) -> Iterator[dict[str, str]]:
    csv.field_size_limit(LARGEST)  # of all readers; 131,072 by default
    reader = csv.DictReader(_lines(file), strict=True)
    check_names(reader.fieldnames or (), "the header")
    for row in reader:
        if None in row:
            raise ValueError("it has more fields than the header")
        yield row


def row_of(row: Any, column: str | None, place: str) -> Row:
    """A row with the columns that are its document, in which rows of files and lists may differ.

    Raises a ValueError if it has none."""
    row = row if isinstance(row, Mapping) else {}
    filled = {name: value for name, value in row.items() if not _is_empty(value)}
    empty_chats = [name for name in _CHAT_COLUMNS if name in row and name not in filled]
    found = _chosen([*filled], [filled]) or _chosen([*row], [row]) or empty_chats[:1]
    return [row[name] for name in _valid(found, column, [*row], place)], place


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str | list | np.ndarray) and len(value) == 0)


def _valid(found: list[str], column: str | None, names: list[str], place: str) -> list[str]:
    """`column`, or else the columns that were found; raises a ValueError if there are none."""
    if column is None and not found:
        raise ValueError(f"{place}: which column has the documents? Give column=, one of {names}")
    if column is not None and column not in names:
        raise ValueError(f"column={column!r} is not in {place}; it has {names}")
    return found if column is None else [column]


def dataset_rows(dataset: Any, column: str | None) -> Iterator[Row]:
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
    return (([row[name] for name in columns], f"document {i}") for i, row in kept)


def _chosen(names: list[str], sample: list[Any]) -> list[str]:
    """The columns that are documents: chats, a text, or a prompt and its completion, if any."""
    chats = [n for n in _CHAT_COLUMNS if any(messages_of(row.get(n)) for row in sample)]
    texts = [name for name in _TEXT_COLUMNS if name in names]
    return (chats or texts)[:1] or [name for name in _PAIR if set(_PAIR) <= {*names}]


def row_documents(
    rows: Iterable[Row], tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[Any, str]]:
    """The documents of rows, and their names; the tokenizer's chat template renders chats.

    Where it has none, or it refuses a chat, each turn is a document, as in the datastores of REST's
    authors (arXiv 2311.08252)."""
    refused = skipped = 0
    for cells, place in rows:
        values = [value for value in cells if value is not None]
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
            except REFUSALS:
                refused += 1
        yield from ((message["content"] or "", place) for message in messages)
    if refused:
        logger.warning(
            "the tokenizer's chat template refused %s; each turn is a document instead",
            counted(refused, "chat"),
        )
    if skipped:
        logger.warning("skipped %s without text", counted(skipped, "message part"))


def messages_of(value: Any) -> list[dict[str, Any]] | None:
    """A chat as messages with a role and a content, `None` if the value is not a chat.

    It may be a list of such messages, of ShareGPT's `from` and `value`, or of turns of user and
    assistant."""
    value = _as_list(value)
    if not isinstance(value, list) or not value:
        return None
    if all(isinstance(turn, str) for turn in value):
        roles = ("user", "assistant")
        return [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(value)]
    for role, content in (("role", "content"), ("from", "value")):
        if all(isinstance(turn, Mapping) and {role, content} <= turn.keys() for turn in value):
            return [{**turn, "role": turn[role], "content": turn[content]} for turn in value]
    return None


def with_texts(messages: list[dict[str, Any]], place: str) -> tuple[list[dict[str, Any]], int]:
    """Messages whose content is a text or `None`, and how many parts of messages were no text."""
    plain = []
    skipped = 0
    for message in messages:
        role = message["role"]
        content = message["content"]
        if not isinstance(role, str):
            raise ValueError(f"{place}: the role of a message must be a text, but is {role!r:.80}")
        if content is not None:
            content, others = text_of(content, place)
            skipped += others
        plain.append({**message, "role": _ROLES.get(role, role), "content": content})
    return plain, skipped


def text_of(content: Any, place: str) -> tuple[str, int]:
    """The text of a message's content, and how many parts of it are no text, such as images."""
    content = _as_list(content)
    if isinstance(content, str):
        return content, 0
    if not isinstance(content, list) or not all(
        isinstance(part, str | Mapping) for part in content
    ):
        wanted = "the content of a message must be a text or a list of parts"
        raise ValueError(f"{place}: {wanted}, but is {content!r:.80}")
    parts = [part if isinstance(part, str) else part.get("text") for part in content]
    texts = [part for part in parts if isinstance(part, str)]
    return "".join(texts), len(parts) - len(texts)


def _as_list(value: Any) -> Any:
    """A list, where pandas has an array."""
    return value.tolist() if isinstance(value, np.ndarray) else value
