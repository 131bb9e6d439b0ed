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
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from reprlib import repr as short
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np

from .files import CONFIG, DatastoreError, FileEntry, open_file, unreadable, write_bytes
from .lock import locked, release
from .schema import Named, parse, values_of

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")

logger = logging.getLogger("hf_refspec")

LOCK = ".lock"
# What a new folder is called while it is written, in the folder that `build_place` names.
_NEW = "new"
# No real JSON file comes near it, with 30,000 shards neither; what is larger is not read.
LARGEST_JSON = 1 << 24


@dataclass(frozen=True)
class FolderConfig:
    """What a config.json says; derived classes declare it in their fields, see [`schema`].

    Attributes:
        NOUN (`str`): What the folder is, for messages.
        HEADER (`dict`): The entries that distinguish it from other folders and formats.
        FILES (`tuple` of [`Named`]): The names that its files can have.
        REMEDY (`str`): What to do with a folder of another format.
        TEMPLATE (`str`): The file with the card's text; "" for folders that are not published.
        fingerprint (`str`): Of the tokenizer, see [`tokenizer_fingerprint`].
        tokenizer (`str`): Its name, for people.
    """

    NOUN: ClassVar[str]
    HEADER: ClassVar[dict[str, Any]]
    FILES: ClassVar[tuple[Named, ...]]
    REMEDY: ClassVar[str] = "install the hf_refspec that it was made with, or build it again"
    TEMPLATE: ClassVar[str] = ""

    fingerprint: str
    tokenizer: str

    @property
    def tokenizer_ids(self) -> int | None:
        """How many ids the tokenizer has, where it is known: of others `vocab_size` is the
        model's."""
        return None

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
        """Replaces a folder's config.json in one go.

        Raises:
            DatastoreError: If it could not be read again; the one that is there stays.
            OSError: If it cannot be written.
        """
        write_bytes(folder / CONFIG, self.as_json(folder))
        sync_folder(folder)

    def as_json(self, folder: Path) -> bytes:
        """The text of the config.json of a folder; raises a DatastoreError as `write`."""
        try:
            text = json_of({**self.HEADER, **asdict(self)})
            if len(text) > LARGEST_JSON:
                raise ValueError(f"it would have {len(text):,} bytes, more than {LARGEST_JSON:,}")
            self._parsed(json.loads(text))
        except (KeyError, TypeError, ValueError) as error:
            raise DatastoreError(f"{folder / CONFIG} cannot be written: {error}") from None
        return text

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
            return cls._parsed(content)
        except KeyError as error:
            raise DatastoreError(f"{path} is damaged: it does not name {error}") from None
        except ValueError as error:
            raise DatastoreError(f"{path} is damaged: {error}") from None

    @classmethod
    def opened(cls, folder: Path, use: Callable[[Any], T]) -> T:
        """Reads a folder's config.json and hands it to `use`, which opens the files that it names.

        Another process may replace config.json meanwhile and delete files that the old one named.
        If `use` fails with a DatastoreError, and config.json is another one by now, all is done
        again.

        Returns:
            What `use` returned at last.
        """
        while True:
            version = _version(folder / CONFIG)
            config = cls.read(folder)
            try:
                return use(config)
            except DatastoreError:
                if _version(folder / CONFIG) == version:
                    raise
            except MemoryError as error:
                raise unreadable(folder, error) from None

    @classmethod
    def _parsed(cls, content: dict[str, Any]) -> Self:
        """The config that a JSON object is; raises a KeyError or a ValueError if it is none."""
        config = parse(cls, {k: value for k, value in content.items() if k not in cls.HEADER})
        names = [file.name for file in config.files()]
        if len(set(names)) < len(names):
            raise ValueError("it names a file twice")
        config.check()
        return config

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
            if type(found) is not type(expected) or found != expected:
                raise DatastoreError(
                    f"{path} has {key} {short(found)}, but of a {cls.NOUN} this hf_refspec reads "
                    f"only {expected!r}; {cls.REMEDY}"
                )


def _version(path: Path) -> tuple[int, ...] | None:
    """What differs once a file is replaced, even by one that says the same."""
    try:
        found = path.stat()
    except (OSError, ValueError):
        return None
    return found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size


def read_json(path: Path, noun: str) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        DatastoreError: If there is no such file in the folder of a `noun`, or it is none.
    """
    try:
        with open_file(path) as file:
            text = file.read(LARGEST_JSON + 1)
    except FileNotFoundError:
        if not os.path.exists(path.parent):
            raise DatastoreError(f"{path.parent} does not exist; name a {noun}") from None
        raise DatastoreError(f"{path.parent} is not a {noun}: it has no {CONFIG}") from None
    except NotADirectoryError:
        raise DatastoreError(f"{path.parent} is not a folder with a {noun}") from None
    except OSError as error:
        raise unreadable(path, error) from None
    if len(text) > LARGEST_JSON:
        raise DatastoreError(f"{path} is too large to be a {noun}'s")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DatastoreError(f"{path} is damaged: it is not JSON ({error})") from None
    return content if isinstance(content, dict) else {}


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes a JSON file; one that is there already is replaced in one go."""
    write_bytes(path, json_of(content))
    sync_folder(path.parent)


def json_of(content: dict[str, Any]) -> bytes:
    """The text of a JSON file."""
    return (json.dumps(content, indent=1) + "\n").encode()


def token_dtype(vocab_size: int, separator: bool = True) -> np.dtype:
    """uint16 where it holds all tokens of a vocabulary and a separator, else uint32."""
    return np.dtype(np.uint16 if vocab_size + separator <= 2**16 else np.uint32)


@contextmanager
def new_folder(path: Path, resume: bool = False) -> Iterator[Path]:
    """Yields a folder to write into, which is at `path` once all is written.

    Until then it is in the folder that [`build_place`] names. With `resume` it begins with what an
    earlier process has left, and stays if this one fails.

    Raises:
        FileExistsError: If there is something at `path`.
        DatastoreError: If another process is writing it, or what is in its place is not ours.
    """
    new = build_place(path) / _NEW
    if os.path.lexists(path) and new.parent.is_dir():
        with suppress(DatastoreError, OSError), _only_builder(path):
            pass  # what a process has left that was killed when all was done goes now
    _check_free(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _only_builder(path):
        _check_free(path)  # another process may have finished it meanwhile
        try:
            if not resume:
                _delete_folder(new)  # of a process that was killed
            new.mkdir(exist_ok=resume)
            yield new
            sync_folder(new)
            os.rename(new, path)
            sync_folder(path.parent)
        except BaseException:
            if not resume:
                shutil.rmtree(new, ignore_errors=True)
            raise


def build_place(path: Path) -> Path:
    """The folder that holds a new folder until that is whole and moved to `path`, and its lock.

    Nobody calls a folder of their own so, and one with anything else in it is not touched.
    """
    return path.with_name(f".{path.name}.hf_refspec-build")


@contextmanager
def _only_builder(path: Path) -> Iterator[None]:
    """Makes the place of a build and keeps others out of it; at the end it goes if it is empty."""
    place = build_place(path)
    refusal = f"{path} is being written by another process; wait for it or choose another path"
    while True:
        with suppress(FileExistsError):
            place.mkdir()
        try:
            _check_ours(place)
            lock = locked(place / LOCK, refusal)
            break
        except FileNotFoundError:  # another build has just ended, and with it the place
            continue
    try:
        _check_ours(place)
        yield
    finally:
        with suppress(OSError):  # what can be resumed is in it, or it was moved
            (place / _NEW).rmdir()
        release(lock)
        with suppress(OSError):  # it is not empty then, or another build has begun
            place.rmdir()


def _check_ours(place: Path) -> None:
    """Raises a DatastoreError if what is in the place of a build is not from one."""
    ours = stat.S_ISDIR(os.lstat(place).st_mode) and set(os.listdir(place)) <= {_NEW, LOCK}
    with suppress(FileNotFoundError):
        ours = ours and stat.S_ISDIR(os.lstat(place / _NEW).st_mode)
    if not ours:
        raise DatastoreError(
            f"{place} is in the way, and not from a build of hf_refspec; move it elsewhere"
        )


def _delete_folder(path: Path) -> None:
    with suppress(FileNotFoundError):
        shutil.rmtree(path)


def _check_free(path: Path) -> None:
    if os.path.lexists(path):
        raise FileExistsError(
            f"{path} exists; choose another path, delete it, or extend it where it is a datastore"
        )


def check_writable(folder: Path) -> None:
    """Raises a PermissionError, before there is work to be lost, if this process may not write into
    a folder."""
    as_effective_user = os.access in os.supports_effective_ids
    if folder.is_dir() and not os.access(folder, os.W_OK, effective_ids=as_effective_user):
        raise PermissionError(
            f"{folder} cannot be changed: you may not write into it; change a copy, which "
            "save_pretrained() makes"
        )


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Keeps others from writing into a folder; its lock is in it. Raises a DatastoreError if
    another process is writing into it, and as [`check_writable`]."""
    check_writable(folder)
    lock = locked(
        folder / LOCK, f"{folder} is being written by another process; wait for it, then try again"
    )
    try:
        yield
    finally:
        release(lock)


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
