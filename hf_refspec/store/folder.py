"""The stored folder: a config.json that names all its files, written whole or not at all.

    config.json       what the folder is, and its files with sizes and checksums
    *.safetensors     its arrays, mapped into memory
    README.md         the card, on the Hub

Datastores, knowledge bases, kNN datastores and session caches are such folders; each is one
dataclass derived from [`FolderConfig`]. A file is never changed once config.json names it, and
config.json is replaced in one go: whoever has the folder open goes on with what was opened.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from reprlib import repr as short
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from filelock import FileLock, Timeout

from .files import CONFIG, DatastoreError, FileEntry, replacing
from .schema import Named, parse, values_of

if TYPE_CHECKING:
    from typing_extensions import Self

logger = logging.getLogger("hf_refspec")

LOCK = ".lock"
# No real config comes near it; what is larger is not read.
_LARGEST_CONFIG = 1 << 23


@dataclass(frozen=True)
class FolderConfig:
    """What a config.json says; derived classes declare it in their fields, see [`schema`].

    Attributes:
        NOUN (`str`): What the folder is, for messages.
        HEADER (`dict`): The entries that distinguish it from other folders and formats.
        OLDER (`dict`): Values of these that are read as well, see `_newest`.
        FILES (`tuple` of [`Named`]): The names that its files can have.
        REMEDY (`str`): What to do with a folder of another format.
        TEMPLATE (`str`): The file with the card's text; "" for folders that are not published.
        fingerprint (`str`): Of the tokenizer, see [`tokenizer_fingerprint`].
        tokenizer (`str`): Its name, for people.
    """

    NOUN: ClassVar[str]
    HEADER: ClassVar[dict[str, Any]]
    OLDER: ClassVar[dict[str, tuple[Any, ...]]] = {}
    FILES: ClassVar[tuple[Named, ...]]
    REMEDY: ClassVar[str] = "install the hf_refspec that it was made with, or build it again"
    TEMPLATE: ClassVar[str] = ""

    fingerprint: str
    tokenizer: str

    def check(self) -> None:
        """Checks what no single field tells.

        Raises:
            ValueError: If the fields do not fit together.
        """

    def files(self) -> list[FileEntry]:
        """All files that the folder consists of, beside config.json."""
        return list(values_of(FileEntry, self))

    def card_texts(self) -> dict[str, str]:
        """What the template of the card asks for that is no field and no entry of `source`."""
        return {}

    def write(self, folder: Path) -> None:
        """Replaces a folder's config.json in one go."""
        write_json(folder / CONFIG, {**self.HEADER, **asdict(self)})

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Reads a folder's config.json and checks all that it says by itself.

        Raises:
            DatastoreError: If there is none, or it is not one that this version can read.
        """
        path = folder / CONFIG
        content = read_json(path, cls.NOUN)
        cls._check_header(path, content)
        try:
            config = parse(cls, cls._newest(content))
            names = [file.name for file in config.files()]
            if len(set(names)) < len(names):
                raise ValueError("it names a file twice")
            config.check()
        except KeyError as error:
            raise DatastoreError(f"{path} is damaged: it does not name {error}") from None
        except ValueError as error:
            raise DatastoreError(f"{path} is damaged: {error}") from None
        return config

    @classmethod
    def _newest(cls, content: dict[str, Any]) -> dict[str, Any]:
        """The entries of a config.json but the header, as this version would have written them."""
        return {key: value for key, value in content.items() if key not in cls.HEADER}

    @classmethod
    def _check_header(cls, path: Path, content: dict[str, Any]) -> None:
        for key in ("kind", "format"):  # of another folder
            if key in content and key not in cls.HEADER:
                raise DatastoreError(
                    f"{path} is not a {cls.NOUN}'s: its {key} is {short(content[key])}"
                )
        for key, expected in cls.HEADER.items():
            if key not in content:
                raise DatastoreError(f"{path} is not a {cls.NOUN}'s: it names no {key}")
            found = content[key]
            readable = (*cls.OLDER.get(key, ()), expected)
            if type(found) is not type(expected) or found not in readable:
                raise DatastoreError(
                    f"{path} has {key} {short(found)}, but of a {cls.NOUN} this hf_refspec reads "
                    f"only {' or '.join(map(repr, readable))}; {cls.REMEDY}"
                )


def read_json(path: Path, noun: str) -> dict[str, Any]:
    """The JSON object in a file."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # to open a pipe would wait for a writer
            raise DatastoreError(f"{path} is not a file")
        with open(path, "rb") as file:
            text = file.read(_LARGEST_CONFIG + 1)
    except FileNotFoundError:
        if not path.parent.exists():
            raise DatastoreError(f"{path.parent} does not exist; name a {noun}") from None
        raise DatastoreError(f"{path.parent} is not a {noun}: it has no {CONFIG}") from None
    except NotADirectoryError:
        raise DatastoreError(f"{path.parent} is not a folder with a {noun}") from None
    if len(text) > _LARGEST_CONFIG:
        raise DatastoreError(f"{path} is too large to be a {noun}'s")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DatastoreError(f"{path} is damaged: it is not JSON ({error})") from None
    return content if isinstance(content, dict) else {}


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes a JSON file; one that is there already is replaced in one go."""
    with replacing(path) as new:
        new.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    sync_folder(path.parent)


def token_dtype(vocab_size: int, separator: bool = True) -> np.dtype:
    """uint16 where it holds all tokens of a vocabulary and a separator, else uint32."""
    return np.dtype(np.uint16 if vocab_size + separator <= 2**16 else np.uint32)


@contextmanager
def new_folder(path: Path, resume: bool = False) -> Iterator[Path]:
    """Yields a folder to write into, `<path>.partial`, which is at `path` once all is written.

    With `resume` it begins with what an earlier process has left, and stays if this one fails.

    Raises:
        FileExistsError: If there is something at `path`.
        DatastoreError: If another process is writing it.
    """
    _check_free(path)
    partial = path.with_name(f"{path.name}.partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    # The lock is beside it: what is renamed is whole, without anything to be cleared away.
    with only_writer(partial, partial.with_name(f"{partial.name}{LOCK}")):
        try:
            _check_free(path)  # another process may have finished it meanwhile
            if not resume:
                shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
            partial.mkdir(exist_ok=resume)
            yield partial
            sync_folder(partial)
            os.rename(partial, path)
            sync_folder(path.parent)
        except BaseException:
            if not resume:
                shutil.rmtree(partial, ignore_errors=True)
            raise


def _check_free(path: Path) -> None:
    if os.path.lexists(path):
        raise FileExistsError(
            f"{path} exists; choose another path, delete it, or extend it where it is a datastore"
        )


@contextmanager
def only_writer(folder: Path, lock: Path | None = None) -> Iterator[None]:
    """Keeps others from writing into a folder; its lock is in it, or at `lock`. Raises a
    DatastoreError if another process is writing into it."""
    lock = lock or folder / LOCK
    refusal = f"{folder} is being written by another process; wait for it or choose another path"
    held = locked(lock, refusal)
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        held.release()


def locked(path: Path, refusal: str) -> FileLock:
    """Takes the lock whose file is at `path` without waiting; who fails raises a DatastoreError
    with the message `refusal`."""
    lock = FileLock(path, thread_local=False)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise DatastoreError(refusal) from None
    return lock


def sweep(folder: Path, ours: re.Pattern[str], keep: Iterable[str]) -> None:
    """Deletes the files whose names match `ours` and are not to be kept: a process that was killed
    has left them."""
    keep = set(keep)
    for file in folder.iterdir():
        if ours.fullmatch(file.name) and file.name not in keep:
            delete(file)


def delete(path: Path) -> None:
    """Deletes a file of the folder that config.json no longer names, if the system lets it."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:  # where it is still mapped into memory; it goes when next opened
        logger.debug("cannot delete %s: %s", path, error)


def sync_folder(folder: Path) -> None:
    """Forces the names of the files in a folder to the disk, where the system can do that."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
