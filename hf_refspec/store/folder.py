"""The files of a datastore: what is in them, written whole or not at all, and never trusted.

    config.json                     all else is named in it, with sizes and checksums
    tokens-00001.safetensors        tokens   uint16 or uint32, a separator after each document
    suffixes-00001.safetensors      suffixes int32, the suffix array of those tokens
    ngrams-0123456789ab.safetensors (compact form) n-grams and their draft trees
    README.md                       the card, on the Hub

A file is never changed once config.json names it, and config.json is replaced in one go. Whoever
has the store open goes on with what he opened.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from reprlib import repr as short
from typing import Any, TypeVar

import numpy as np
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

T = TypeVar("T")

FORMAT_VERSION = 1
CONFIG = "config.json"
LOCK = ".lock"
FILE_NAME = re.compile(r"(tokens|suffixes)-[0-9]{5,}\.safetensors|ngrams-[0-9a-f]{12}\.safetensors")
# No real config or header comes near it; what is larger is not read.
_LARGEST_CONFIG = 1 << 23
_LARGEST_HEADER = 1 << 16
# Two files of each are mapped into memory, and Linux lets a process have 65,530 of such maps.
MOST_SHARDS = 30_000
LONGEST_NGRAM = 8
_DEEPEST_SOURCE = 20
# A position in a shard must fit into an int32.
LARGEST_SHARD = 2**31 - 2


class DatastoreError(ValueError):
    """A datastore that cannot be used: files are missing, damaged or made for something else."""


@dataclass(frozen=True)
class FileEntry:
    """A file that config.json vouches for.

    Attributes:
        name (`str`): Its name in the datastore's folder.
        size (`int`): In bytes.
        sha256 (`str`): The checksum of all of it, in hexadecimal.
    """

    name: str
    size: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> FileEntry:
        """Reads the file at `path` and notes what it is."""
        return cls(path.name, path.stat().st_size, sha256(path))


@dataclass(frozen=True)
class ShardEntry:
    """A part of the corpus.

    Attributes:
        tokens (`int`): Entries of its arrays, the separators among them.
        documents (`int`): Documents that end in it.
        tokens_file, suffixes_file (`FileEntry`): Where its two arrays are.
    """

    tokens: int
    documents: int
    tokens_file: FileEntry
    suffixes_file: FileEntry


@dataclass(frozen=True)
class NgramsEntry:
    """The compact form.

    Attributes:
        ngrams (`list[int]`): How many n-grams of the orders 1, 2, ... are in it.
        nodes (`int`): Nodes of all draft trees together.
        corpus_tokens (`int`): Entries of the shards that were counted.
        file (`FileEntry`): Where its arrays are.
    """

    ngrams: list[int]
    nodes: int
    corpus_tokens: int
    file: FileEntry


@dataclass(frozen=True)
class StoreConfig:
    """What config.json says.

    Attributes:
        fingerprint (`str`): Of the tokenizer, see [`tokenizer_fingerprint`].
        tokenizer (`str`): Its name, for people.
        vocab_size (`int`): All token ids are below it.
        source (`dict`): How the store was built, for people and for the card.
        shards (`list[ShardEntry]`): Empty in a store that has only the compact form.
        ngrams (`NgramsEntry`, *optional*): The compact form, if there is one.
    """

    fingerprint: str
    tokenizer: str
    vocab_size: int
    source: dict[str, Any] = field(default_factory=dict)
    shards: list[ShardEntry] = field(default_factory=list)
    ngrams: NgramsEntry | None = None

    @property
    def token_dtype(self) -> np.dtype:
        """uint16 where it holds all tokens and the separator, else uint32."""
        return np.dtype(np.uint16 if self.vocab_size < 2**16 else np.uint32)

    @property
    def separator(self) -> int:
        """What stands after each document: the largest number of `token_dtype`."""
        return int(np.iinfo(self.token_dtype).max)

    def files(self) -> list[FileEntry]:
        """All files that the store consists of, beside config.json."""
        files = [file for shard in self.shards for file in (shard.tokens_file, shard.suffixes_file)]
        return [*files, self.ngrams.file] if self.ngrams else files

    def write(self, folder: Path) -> None:
        """Replaces the folder's config.json in one go."""
        write_config(folder, {"format_version": FORMAT_VERSION, **asdict(self)})

    @classmethod
    def read(cls, folder: Path) -> StoreConfig:
        """Reads a folder's config.json and checks all that it says by itself.

        Raises:
            DatastoreError: If there is none, or it is not one that this version can read.
        """
        return read_config(folder, "datastore", FORMAT_VERSION, _parse_config)


def write_config(folder: Path, content: dict[str, Any]) -> None:
    """Replaces a folder's config.json in one go."""
    new = folder / f".{CONFIG}.new"
    with _gone_on_failure(new):
        with open(new, "w", encoding="utf-8") as file:
            file.write(json.dumps(content, indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, folder / CONFIG)
    sync_folder(folder)


def read_config(
    folder: Path, noun: str, format_version: int, parse: Callable[[dict[str, Any]], T]
) -> T:
    """Reads a folder's config.json.

    Args:
        folder (`Path`): The folder.
        noun (`str`): What it should be, for messages.
        format_version (`int`): The one that can be read.
        parse (`Callable`): Makes of the content what it says. What it lacks may be a `KeyError`,
            what is wrong with it a `ValueError`.

    Raises:
        DatastoreError: If there is none, or it is not one that this version can read.
    """
    path = folder / CONFIG
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # to open a pipe would wait for a writer
            raise DatastoreError(f"{path} is not a file")
        with open(path, "rb") as file:
            text = file.read(_LARGEST_CONFIG + 1)
        if len(text) > _LARGEST_CONFIG:
            raise DatastoreError(f"{path} is too large to be a {noun}'s")
        content = json.loads(text)
    except FileNotFoundError:
        raise DatastoreError(f"{folder} is not a {noun}: it has no {CONFIG}") from None
    except NotADirectoryError:
        raise DatastoreError(f"{folder} is not a folder with a {noun}") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, DatastoreError):
            raise
        raise DatastoreError(f"{path} is damaged: it is not JSON ({error})") from None
    if not isinstance(content, dict) or "format_version" not in content:
        raise DatastoreError(f"{path} is not a {noun}'s: it names no format_version")
    version = content["format_version"]
    if type(version) is not int or version != format_version:
        raise DatastoreError(
            f"{path} has format_version {short(version)}, but this hf_refspec reads only "
            f"{format_version}; install the hf_refspec that it was made with, or build it again"
        )
    try:
        return parse(content)
    except KeyError as error:
        raise DatastoreError(f"{path} is damaged: it does not name {error}") from None
    except ValueError as error:
        if isinstance(error, DatastoreError):
            raise
        raise DatastoreError(f"{path} is damaged: {error}") from None


def _parse_config(content: dict[str, Any]) -> StoreConfig:
    vocab_size = expected_count(content, "vocab_size", 1, 2**31 - 1)
    shards = [
        ShardEntry(
            tokens=expected_count(shard, "tokens", 1, LARGEST_SHARD),
            documents=expected_count(shard, "documents", 0, LARGEST_SHARD),
            tokens_file=_parse_file(shard["tokens_file"], "tokens"),
            suffixes_file=_parse_file(shard["suffixes_file"], "suffixes"),
        )
        for shard in _list(content, "shards", MOST_SHARDS)
    ]
    ngrams = content["ngrams"]
    if ngrams is not None:
        listed = _list(ngrams, "ngrams", LONGEST_NGRAM)
        counts = {f"ngrams[{i}]": count for i, count in enumerate(listed)}
        ngrams = NgramsEntry(
            ngrams=[expected_count(counts, order, 0, LARGEST_SHARD) for order in counts],
            nodes=expected_count(ngrams, "nodes", 0, LARGEST_SHARD),
            corpus_tokens=expected_count(ngrams, "corpus_tokens", 0, 2**62),
            file=_parse_file(ngrams["file"], "ngrams"),
        )
    config = StoreConfig(
        fingerprint=expected_entry(content, "fingerprint", str),
        tokenizer=expected_entry(content, "tokenizer", str),
        vocab_size=vocab_size,
        source=expected_entry(content, "source", dict),
        shards=shards,
        ngrams=ngrams,
    )
    if not shards and ngrams is None:
        raise ValueError("it names neither shards nor n-grams")
    if ngrams is not None and not ngrams.ngrams:
        raise ValueError("its n-grams have no length")
    names = [file.name for file in config.files()]
    if len(set(names)) < len(names):
        raise ValueError("it names a file twice")
    check_nesting(config.source)
    return config


def _parse_file(content: Any, kind: str) -> FileEntry:
    return parse_file(content, kind, FILE_NAME)


def parse_file(content: Any, kind: str, names: re.Pattern[str]) -> FileEntry:
    """What config.json says about a file, whose name must be one of `names` and begin with `kind`.

    Raises:
        KeyError, ValueError: If it does not say it, or something else.
    """
    name = expected_entry(content, "name", str)
    # Else a datastore could name a file outside of its folder.
    if not names.fullmatch(name) or not name.startswith(kind):
        raise ValueError(f"{short(name)} is not the name of a file of {kind} in its folder")
    return FileEntry(
        name, expected_count(content, "size", 0, 2**62), expected_entry(content, "sha256", str)
    )


def expected_entry(content: Any, key: Any, kind: type) -> Any:
    """An entry of config.json, which must be of a type."""
    if not isinstance(content, dict):
        raise ValueError(f"{short(content)} should be an object that names {key}")
    if not isinstance(content[key], kind) or isinstance(content[key], bool):
        raise ValueError(f"{key} is {short(content[key])}")
    return content[key]


def expected_count(content: Any, key: Any, low: int, high: int) -> int:
    """A number of config.json, which must be from `low` to `high`."""
    number = expected_entry(content, key, int)
    if not low <= number <= high:
        raise ValueError(f"{key} is {short(number)}")
    return number


def _list(content: Any, key: str, most: int) -> list[Any]:
    entries = expected_entry(content, key, list)
    if len(entries) > most:
        raise ValueError(f"{key} has {len(entries)} entries, more than {most}")
    return entries


def check_nesting(source: dict[str, Any]) -> None:
    """Refuses a source with lists and dicts so deep in each other that Python cannot write it.

    Raises:
        ValueError: If it is such a one.
    """
    depth = 0
    level: list[Any] = [source]
    while level and depth <= _DEEPEST_SOURCE:
        depth += 1
        inner = [each.values() if isinstance(each, dict) else each for each in level]
        level = [each for some in inner for each in some if isinstance(each, (dict, list))]
    if depth > _DEEPEST_SOURCE:
        raise ValueError("source is nested too deep")


def write_arrays(path: Path, arrays: dict[str, np.ndarray]) -> FileEntry:
    """Writes arrays into a new file and forces it to the disk.

    Args:
        path (`Path`): The file; one that is there already is replaced in one go.
        arrays (`dict[str, np.ndarray]`): By name.

    Raises:
        OSError: If it cannot be written, as on a full disk.
    """
    new = path.with_name(f".{path.name}.new")
    with _gone_on_failure(new):
        try:
            save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, new)
        except SafetensorError as error:
            raise OSError(f"cannot write {path}: {error}") from None
        with open(new, "rb") as file:
            os.fsync(file.fileno())
        os.chmod(new, 0o644)  # It is written for its owner's eyes only.
        entry = FileEntry(path.name, new.stat().st_size, sha256(new))
        os.replace(new, path)
    return entry


def write_rows(
    path: Path, name: str, rows: Iterable[np.ndarray], shape: tuple[int, int]
) -> FileEntry:
    """Writes one float32 array, laid out in one dimension, without ever having all of it in memory.

    Args:
        path (`Path`): The new file.
        name (`str`): The array's.
        rows (`Iterable[np.ndarray]`): Its rows in order, float32 of shape `(any, shape[1])`.
        shape (`tuple[int, int]`): Of all of it.

    Raises:
        OSError: If it cannot be written, as on a full disk.
    """
    size = 4 * shape[0] * shape[1]
    about = {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}
    header = json.dumps({name: about}).encode()
    header += b" " * (-len(header) % 8)  # The numbers begin at a multiple of their size.
    with _gone_on_failure(path), open(path, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for some in rows:
            file.write(np.ascontiguousarray(some, "<f4").data)
        file.flush()
        os.fsync(file.fileno())
    return FileEntry.of(path)


@contextmanager
def _gone_on_failure(new: Path) -> Iterator[None]:
    """Deletes a new file if what is done meanwhile fails: on a full disk it is in the way."""
    try:
        yield
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def read_arrays(
    folder: Path, entry: FileEntry, expected: Mapping[str, tuple[np.dtype, int | None]]
) -> dict[str, np.ndarray]:
    """Maps the arrays of a file into memory; their content is not read, and not checked.

    Args:
        folder (`Path`): The datastore's folder.
        entry (`FileEntry`): What config.json says about the file.
        expected (`dict`): By name, each array's type and length; `None` is any length.

    Returns:
        `dict[str, np.ndarray]`: The arrays, all with one dimension.

    Raises:
        DatastoreError: If the file is missing or not what it should be.
    """
    path = find_file(folder, entry)
    try:
        with open(path, "rb") as file:
            header = int.from_bytes(file.read(8), "little")
        if header > _LARGEST_HEADER:
            raise ValueError(f"its header should have {header} bytes")
        # Of torch's tensors, and only of those, the library makes no copy.
        with safe_open(path, framework="pt") as file:
            arrays = {name: file.get_tensor(name).numpy() for name in expected}
    except Exception as error:  # Three libraries have their say on a bad header.
        raise DatastoreError(f"{path} is damaged: {error}") from None
    for name, (dtype, length) in expected.items():
        array = arrays[name]
        fits = array.dtype == dtype and array.ndim == 1 and array.flags.aligned
        if not fits or length not in (None, len(array)):
            raise DatastoreError(
                f"{path} is damaged: {name} is {array.dtype} of shape {array.shape}, but should "
                f"be {dtype} with {'one dimension' if length is None else f'{length} entries'}"
            )
    return arrays


def find_file(folder: Path, entry: FileEntry) -> Path:
    """The path of a file, which is not opened.

    Raises:
        DatastoreError: If it is missing, no regular file or of another size.
    """
    path = folder / entry.name
    try:
        found = path.stat()
    except FileNotFoundError:
        raise DatastoreError(
            f"{path} cannot be read: it is missing, though {CONFIG} names it"
        ) from None
    except OSError as error:
        raise DatastoreError(f"{path} cannot be read: {error}") from None
    if not stat.S_ISREG(found.st_mode):
        raise DatastoreError(f"{path} is not a file")
    if found.st_size != entry.size:
        raise DatastoreError(
            f"{path} is damaged: it has {found.st_size} bytes, but {CONFIG} says {entry.size}"
        )
    return path


def check_file(folder: Path, entry: FileEntry) -> None:
    """Reads a whole file and compares it with its checksum.

    Raises:
        DatastoreError: If it is not the file that was written.
    """
    path = find_file(folder, entry)
    try:
        found = sha256(path)
    except OSError as error:
        raise DatastoreError(f"{path} cannot be read: {error}") from None
    if found != entry.sha256:
        raise DatastoreError(
            f"{path} is damaged: its checksum is {found}, but {CONFIG} says {entry.sha256}"
        )


def sha256(path: Path) -> str:
    """The SHA-256 checksum of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to write a datastore into, which is at `path` only once all of it is written.

    Raises:
        FileExistsError: If there is something at `path`.
    """
    if path.exists():
        raise FileExistsError(f"{path} exists; choose another path or delete it")
    partial = path.with_name(f"{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # what a process that was killed has left
    partial.mkdir(parents=True)
    try:
        yield partial
        partial.rename(path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Keeps others from writing into a folder.

    Raises:
        DatastoreError: If another process is writing into it.
    """
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise DatastoreError(
            f"{folder} is being written by another process; wait for it or choose another path"
        ) from None
    try:
        yield
    finally:
        (folder / LOCK).unlink(missing_ok=True)
        lock.release()


def sync_folder(folder: Path) -> None:
    """Forces the names of the files in a folder to the disk, where the system can do that."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
