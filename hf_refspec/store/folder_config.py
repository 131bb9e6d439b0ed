"""The config.json of a stored folder, see `stored_folder.py`."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from reprlib import repr as short
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np
from transformers import PreTrainedTokenizerBase

from .files import CONFIG, DatastoreError, FileEntry, check_file, unreadable, write_bytes
from .folder import LARGEST_JSON, delete, json_of, read_json, sync_folder
from .schema import Named, parse, values_of
from .stored_tokenizer import check_tokenizer, public_name, tokenizer_fingerprint

if TYPE_CHECKING:
    from typing_extensions import Self

VERIFIED = "verified.json"
T = TypeVar("T")


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
