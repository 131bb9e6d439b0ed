"""The config.json of a stored folder, see `stored_folder.py`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from reprlib import repr as short
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np
from transformers import PreTrainedTokenizerBase

from .files import CONFIG, DatastoreError, FileEntry, check_file, read_small, reading, write_bytes
from .folder import sync_folder
from .schema import is_deeper, parse, values_of
from .stored_tokenizer import check_tokenizer, public_name, tokenizer_fingerprint, vocabulary_size

if TYPE_CHECKING:
    from typing_extensions import Self

VERIFIED = "verified.json"
# No real JSON file comes near this size, even with 30,000 shards, or is nested as deep.
_LARGEST_JSON, _DEEPEST_JSON = 1 << 24, 20
# These distinguish a config.json from those of other folders, models and formats.
_HEADER = ("kind", "format", "format_version")
T = TypeVar("T")


@dataclass(frozen=True)
class FolderConfig:
    """The content of a config.json; derived classes declare it in their fields, see [`schema`]."""

    NOUN: ClassVar[str]  # what the folder is, for messages
    HEADER: ClassVar[dict[str, Any]]  # what it has of `_HEADER`
    FILES: ClassVar[tuple[re.Pattern[str], ...]]  # the names that its files can have
    TEMPLATE: ClassVar[str]  # the file with the card's text
    HAS_TOKENIZERS_IDS: ClassVar[bool] = False  # whether `vocab_size` is not the model's

    fingerprint: str
    tokenizer: str

    @classmethod
    def made_for(cls, tokenizer: PreTrainedTokenizerBase, **entries: Any) -> Self:
        """The config of a new folder for a tokenizer."""
        return cls(tokenizer_fingerprint(tokenizer), public_name(tokenizer), **entries)

    def check_tokenizer(self, path: Path, tokenizer: PreTrainedTokenizerBase, remedy: str) -> None:
        """Refuses a tokenizer that the folder at `path` was not made for."""
        check_tokenizer(path, tokenizer, remedy, self.fingerprint, self.tokenizer)
        found, stated = vocabulary_size(tokenizer), getattr(self, "vocab_size", None)
        if self.HAS_TOKENIZERS_IDS and stated != found:  # memory is allocated for as many
            raise DatastoreError(
                f"{path} is damaged: its vocab_size is {stated}, but its tokenizer has {found} ids"
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
        with suppress(OSError):  # the folder can be read, but not written
            (folder / VERIFIED).unlink(missing_ok=True)
        self.check_files(folder)
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        with suppress(OSError):
            note = {"files": self._checksums(), "time": now}
            write_bytes(folder / VERIFIED, json.dumps(note, indent=1).encode())

    def verified(self, folder: Path) -> datetime | None:
        """When [`verify`] last found a folder's files as config.json names them now."""
        with suppress(DatastoreError, OSError, KeyError, TypeError, ValueError, RecursionError):
            note = json.loads(read_small(folder / VERIFIED, _LARGEST_JSON))
            if note["files"] == self._checksums():
                return datetime.fromisoformat(note["time"])
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
            text = (json.dumps({**self.HEADER, **asdict(self)}, indent=1) + "\n").encode()
            if len(text) > _LARGEST_JSON:
                raise ValueError(f"it would have {len(text):,} bytes, more than {_LARGEST_JSON:,}")
            self._parsed(json.loads(text))
        except (TypeError, ValueError) as error:
            raise DatastoreError(f"{folder / CONFIG} cannot be written: {error}") from None
        return text

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Reads a folder's config.json and checks all that it says by itself; raises a
        DatastoreError if there is none, or this version cannot read it."""
        path = folder / CONFIG
        try:
            content = json.loads(read_small(path, _LARGEST_JSON))
        except OSError:  # the file or the folder is missing
            raise DatastoreError(f"{folder} is not a {cls.NOUN}: it has no {CONFIG}") from None
        except DatastoreError:
            raise
        except (ValueError, RecursionError) as error:
            raise DatastoreError(f"{path} is damaged: it is not JSON ({error})") from None
        content = content if isinstance(content, dict) else {}
        header = {key: content[key] for key in _HEADER if key in content}
        if header != cls.HEADER:
            raise DatastoreError(
                f"{path} is not that of a {cls.NOUN} which this hf_refspec reads: it has "
                f"{short(header)}, not {cls.HEADER}; install the hf_refspec that it was made with, "
                "or build it again"
            )
        try:
            return cls._parsed(content)
        except ValueError as error:
            raise DatastoreError(f"{path} is damaged: {error}") from None

    @classmethod
    def opened(cls, folder: Path, use: Callable[[Any], T]) -> T:
        """Returns what `use`, which opens a folder's files, returns for its config; again if `use`
        fails because another process has replaced config.json and deleted files meanwhile."""
        config = cls.read(folder)
        while True:
            try:
                with reading(folder):
                    return use(config)
            except DatastoreError:
                failed, config = config, cls.read(folder)
                if config == failed:
                    raise

    @classmethod
    def _parsed(cls, content: dict[str, Any]) -> Self:
        """Raises a ValueError if the JSON object is not such a config."""
        if is_deeper(content, _DEEPEST_JSON):  # Python could not write it again
            raise ValueError("it is nested too deep")
        config = parse(cls, {k: value for k, value in content.items() if k not in cls.HEADER})
        names = [file.name for file in config.files()]
        if len(set(names)) < len(names):
            raise ValueError("it names a file twice")
        config.check()
        return config


def token_dtype(vocab_size: int, separator: bool = True) -> np.dtype:
    """uint16 where it holds all tokens of a vocabulary and a separator, else uint32."""
    return np.dtype(np.uint16 if vocab_size + separator <= 2**16 else np.uint32)
