"""The stored folder: a config.json that names all its files, and what can be done with it.

    config.json       what the folder is, and its files with sizes and checksums
    *.safetensors     its arrays, memory-mapped
    README.md         the card, on the Hub
    verified.json     when all files were last compared with their checksums

Datastores, knowledge bases, kNN datastores and recycling tables are such folders; the config.json
of each is one dataclass derived from [`FolderConfig`]. A file never changes once config.json names
it, and config.json is replaced atomically: a process that has the folder open is not disturbed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from reprlib import repr as short
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import numpy as np
from huggingface_hub import CommitInfo
from transformers import PreTrainedTokenizerBase

from . import hub
from .files import (
    CONFIG,
    DatastoreError,
    FileEntry,
    check_file,
    copy_file,
    unreadable,
    write_bytes,
)
from .folder import LARGEST_JSON, delete, json_of, new_folder, read_json, sync_folder
from .schema import Named, parse, values_of
from .stored_tokenizer import check_tokenizer, public_name, tokenizer_fingerprint

if TYPE_CHECKING:
    from typing_extensions import Self

VERIFIED = "verified.json"
T = TypeVar("T")
C = TypeVar("C", bound="FolderConfig")


@dataclass(frozen=True)
class FolderConfig:
    """The content of a config.json; derived classes declare it in their fields, see [`schema`]."""

    NOUN: ClassVar[str]  # what the folder is, for messages
    HEADER: ClassVar[dict[str, Any]]  # distinguishes it from other folders and formats
    FILES: ClassVar[tuple[Named, ...]]  # the names that its files can have
    TEMPLATE: ClassVar[str]  # the file with the card's text

    fingerprint: str
    tokenizer: str

    @classmethod
    def made_for(cls, tokenizer: PreTrainedTokenizerBase, **entries: Any) -> Self:
        """The config of a new folder for a tokenizer."""
        return cls(tokenizer_fingerprint(tokenizer), public_name(tokenizer), **entries)

    @property
    def tokenizer_ids(self) -> int | None:
        """How many ids the tokenizer has, where `vocab_size` is its own and not the model's."""
        return None

    def check_tokenizer(self, path: Path, tokenizer: PreTrainedTokenizerBase, remedy: str) -> None:
        """See [`stored_tokenizer.check_tokenizer`]."""
        check_tokenizer(
            path, tokenizer, remedy, self.fingerprint, self.tokenizer, self.tokenizer_ids
        )

    def check(self) -> None:
        """Raises a ValueError if the fields, each valid by itself, do not fit together."""

    def files(self) -> list[FileEntry]:
        """All files that the folder consists of, beside config.json."""
        return list(values_of(FileEntry, self))

    def check_files(self, folder: Path) -> Self:
        """Compares all files in a folder with their checksums; raises a DatastoreError if one
        differs."""
        for entry in self.files():
            check_file(folder, entry)
        return self

    def verify(self, folder: Path) -> None:
        """As `check_files`, and notes in the folder when that was."""
        delete(folder / VERIFIED)
        self.check_files(folder)
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        with suppress(OSError, DatastoreError):  # the folder can be read, but not written
            write_bytes(folder / VERIFIED, json_of({"files": self._checksums(), "time": now}))

    def verified(self, folder: Path) -> datetime | None:
        """When [`verify`] last found a folder's files as config.json names them now."""
        with suppress(DatastoreError, KeyError, TypeError, ValueError):
            noted = read_json(folder / VERIFIED, self.NOUN)
            if noted["files"] == self._checksums():
                return datetime.fromisoformat(noted["time"])
        return None

    def _checksums(self) -> dict[str, str]:
        return {file.name: file.sha256 for file in self.files()}

    def card_texts(self) -> dict[str, str]:
        """What the template of the card needs that is no field and no entry of `source`."""
        return {}

    def write(self, folder: Path) -> None:
        """Replaces a folder's config.json atomically."""
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
        """Reads a folder's config.json and checks all that it says by itself; raises a
        DatastoreError if there is none, or this version cannot read it."""
        path = folder / CONFIG
        content = read_json(path, cls.NOUN)
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
                    f"only {expected!r}; install the hf_refspec that it was made with, or build "
                    "it again"
                )
        try:
            return cls._parsed(content)
        except KeyError as error:
            raise DatastoreError(f"{path} is damaged: it does not name {error}") from None
        except ValueError as error:
            raise DatastoreError(f"{path} is damaged: {error}") from None

    @classmethod
    def opened(cls, folder: Path, use: Callable[[Any], T]) -> T:
        """Reads a folder's config.json and returns what `use`, which opens the files that it
        names, returns for it.

        Another process may meanwhile replace config.json and delete files that the old one named.
        If `use` fails with a DatastoreError and config.json has changed, both are done again.
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
        """Raises a KeyError or a ValueError if the JSON object is not such a config."""
        config = parse(cls, {k: value for k, value in content.items() if k not in cls.HEADER})
        names = [file.name for file in config.files()]
        if len(set(names)) < len(names):
            raise ValueError("it names a file twice")
        config.check()
        return config


def _version(path: Path) -> tuple[int, ...] | None:
    """Differs once a file is replaced, even by one with the same content."""
    with suppress(OSError, ValueError):
        found = path.stat()
        return found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size
    return None


def token_dtype(vocab_size: int, separator: bool = True) -> np.dtype:
    """uint16 where it holds all tokens of a vocabulary and a separator, else uint32."""
    return np.dtype(np.uint16 if vocab_size + separator <= 2**16 else np.uint32)


class StoredFolder(Generic[C]):
    """A folder that is open: [`Datastore`], [`KnowledgeBase`] or [`KnnDatastore`].

    Attributes:
        path (`Path`): The folder.
        config ([`FolderConfig`]): Its config.json.
    """

    config_type: ClassVar[type[FolderConfig]]
    remedy: ClassVar[str] = "build one"
    path: Path
    config: C

    def __init__(self, path: str | os.PathLike, *arguments: Any) -> None:
        self.path, self._arguments = Path(path), arguments
        self.config_type.opened(self.path, self._opened)

    def _opened(self, config: C) -> None:
        self.config = config
        self._open(config)

    def _open(self, config: C) -> None:
        """Opens the files that a config names; called again if it was replaced meanwhile."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path.absolute(), *self._arguments)  # a copy maps the same files

    @classmethod
    def from_pretrained(
        cls,
        repo_or_path: str | os.PathLike,
        *args: Any,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | os.PathLike | None = None,
        local_files_only: bool = False,
        **options: Any,
    ) -> Self:
        """Opens a folder, or a dataset repo on the Hub, of which only what is needed is downloaded.

        Args:
            repo_or_path (`str` or `Path`): A folder, or a repo id such as `"org/store"`.
            revision (`str`, *optional*): A branch, tag or commit.
            token (`str` or `bool`, *optional*): As in `huggingface_hub`.
            cache_dir (`str` or `Path`, *optional*): As in `huggingface_hub`.
            local_files_only (`bool`, *optional*, defaults to `False`): Use only what has been
                downloaded before.
            args, options: The other arguments of the class, such as the tokenizer.

        Raises:
            OSError: If there is no such folder or repo, or it cannot be reached.
            DatastoreError: As the class.
        """
        part, download = cls._part(*args, **options), {"token": token, "cache_dir": cache_dir}
        folder = hub.fetch(
            repo_or_path, cls.config_type, part, revision, local_files_only, **download
        )
        return cls(folder, *args, **options)

    @classmethod
    def _part(cls, *args: Any, **options: Any) -> hub.Part[Any]:
        """Reduces a config to what the class, with these arguments, opens."""
        return lambda config: config

    def save_pretrained(self, path: str | os.PathLike) -> None:
        """Copies all files that are open into a new folder.

        Args:
            path (`str` or `Path`): The folder to make.

        Raises:
            FileExistsError: If there is something at `path`.
            DatastoreError: If a file is not as it was written.
            OSError: If it cannot be written.
        """
        config = self._open_part()
        with self._reading(), new_folder(Path(path)) as folder:
            for entry in config.files():
                copy_file(self.path, entry, folder)
            config.write(folder)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        token: str | bool | None = None,
        commit_message: str | None = None,
        revision: str | None = None,
        create_pr: bool = False,
    ) -> CommitInfo:
        """Publishes the folder as a dataset repo, in one commit, with a card.

        The folder's README.md is the card; where there is none, one is generated.

        Args:
            repo_id (`str`): Such as `"org/store"`; the repo is created if there is none.
            private (`bool`, *optional*): Whether a new repo is private; by default as the owner of
                the account has set it.
            token (`str` or `bool`, *optional*): As in `huggingface_hub`.
            commit_message (`str`, *optional*): The first line of the commit's message.
            revision (`str`, *optional*): A branch; it is created if there is none.
            create_pr (`bool`, *optional*, defaults to `False`): Whether to open a pull request
                instead of changing the branch.

        Returns:
            `huggingface_hub.CommitInfo`: The commit.

        Raises:
            DatastoreError: If a file is not as it was written.
            OSError: If the repo cannot be written; it is never left half changed.
        """
        target = {"private": private, "revision": revision, "create_pr": create_pr}
        return hub.push(self.path, self.config_type, repo_id, token, commit_message, **target)

    def verify(self) -> None:
        """Reads all files that are open and compares them with their checksums.

        Raises:
            DatastoreError: If a file is not as it was written.
        """
        with self._reading():
            self._open_part().verify(self.path)

    @property
    def verified(self) -> datetime | None:
        """When [`verify`] last found the files that are open as they were written, in UTC; `None`
        if it never did, or they were replaced since."""
        return self._open_part().verified(self.path)

    def _open_part(self) -> FolderConfig:
        """The part of the config that is open."""
        part: FolderConfig = self._part(*self._arguments)(self.config)
        return part

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Around later reads of an open folder: if one fails because another process has replaced
        the files, the error says so."""
        try:
            yield
        except DatastoreError as error:
            with suppress(DatastoreError):
                if self.config_type.read(self.path) != self.config:
                    error = DatastoreError(
                        f"{self.path} has been changed by another process since it was opened; "
                        f"open it again ({error})"
                    )
            raise error from None
        except MemoryError as error:
            raise unreadable(self.path, error) from None

    def _damaged(self, entry: FileEntry, reason: str) -> DatastoreError:
        return DatastoreError(f"{self.path / entry.name} is damaged: {reason}")

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Refuses a tokenizer that the folder was not made for.

        Raises:
            DatastoreError: If it is another one.
        """
        self.config.check_tokenizer(self.path, tokenizer, f"{self.remedy} for this tokenizer")
