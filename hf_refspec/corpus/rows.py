"""Files of rows, which are read one by one: JSON lines, JSON, CSV and Parquet."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from ...extras import require
from ..files import DatastoreError, open_file, reading
from ..printable import one_line, printable

ROWS = (".jsonl", ".json", ".csv", ".parquet")
_VALUE = re.compile(r"[^\s,]")
# Read at a time: characters of JSON, rows of Parquet, bytes of a text.
_PART = 1 << 16
_BATCH = 128
_BLOCK = 1 << 20
# Bytes or characters of a text or row, which a small .gz file could hold any number of.
LARGEST = 1 << 28
_TOO_LARGE = f"is longer than {LARGEST:,} bytes or characters; cut it into several documents"


def kind_of(path: Path) -> str:
    """The ending of a file's name that says what it holds: `".jsonl"` of `data.JSONL.gz`."""
    return Path(path.name.lower().removesuffix(".gz")).suffix


@contextmanager
def open_content(path: Path) -> Iterator[Any]:
    """Opens a file for reading, decompressed if its name ends in .gz; raises as [`open_file`]."""
    with open_file(path) as file, reading(path):
        try:
            yield gzip.GzipFile(fileobj=file) if path.suffix.lower() == ".gz" else file
        except (EOFError, zlib.error) as error:
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
    """The rows of a file, numbered from 1; in JSON lines, for which any other ending is taken, by
    line. `errors` says what becomes of invalid UTF-8, as in `open`. Raises a ValueError that names
    the file and the row if it is not of its kind."""
    kind = kind_of(path) if kind_of(path) in ROWS else ".jsonl"
    number = 0
    with open_content(path) as file:
        try:
            if kind == ".parquet":
                rows: Iterable[Any] = _parquet_rows(file, path)
            else:
                text = io.TextIOWrapper(file, "utf-8-sig", errors, newline="")
                rows = {".json": _json_values, ".csv": _csv_rows}.get(kind, _json_lines)(text)
            for number, row in enumerate(rows, 1):
                if row is not None:
                    yield number, row
        except (ValueError, TypeError, LookupError, RuntimeError, csv.Error) as error:
            reason = one_line(error)
            if isinstance(error, json.JSONDecodeError):
                reason = error.msg.removesuffix(" at")
                reason += f" at column {error.colno}" * (kind == ".jsonl")
            if kind_of(path) not in ROWS:
                reason += f"; {', '.join(ROWS)} and these with .gz are read, any other as .jsonl"
            message = f"{printable(path)}, row {number + 1} is not valid {kind}: {reason}"
            raise ValueError(message) from None


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


def _json_values(file: TextIO) -> Iterator[Any]:
    """The elements of an array, or values one after another, each decoded when it is complete."""
    decode = json.JSONDecoder(object_pairs_hook=_object).raw_decode
    text = ""
    begin = 0
    bracket = "["  # the one that may come next
    ended = False
    while not ended:
        part = file.read(max(_PART, len(text) - begin))  # twice as much for a value that is long
        text = text[begin:] + part
        begin = 0
        ended = not part
        while found := _VALUE.search(text, begin):
            begin = found.start()
            if text[begin] == bracket:
                bracket = "]" if bracket == "[" else ""
                begin += 1
                continue
            try:  # a number that is cut in two is no row either way
                value, begin = decode(text, begin)
            except json.JSONDecodeError:
                if ended:
                    raise
                if len(text) - begin > LARGEST:
                    raise ValueError(f"it {_TOO_LARGE}") from None
                break
            yield value
    if bracket == "]":
        raise ValueError("the array has no end")


def _csv_rows(file: TextIO) -> Iterator[dict[str, str]]:
    csv.field_size_limit(LARGEST)  # of all readers; 131,072 by default
    reader = csv.DictReader(_lines(file), strict=True)
    check_names(reader.fieldnames or (), "the header")
    for row in reader:
        if None in row:
            raise ValueError("it has more fields than the header")
        yield row


def _parquet_rows(file: BinaryIO, path: Path) -> Iterator[dict[str, Any]]:
    parquet = require("pyarrow.parquet", str(path), "datastore")
    opened = parquet.ParquetFile(file)
    check_names(opened.schema_arrow.names, "the file")
    for batch in opened.iter_batches(_BATCH):
        yield from batch.to_pylist()
