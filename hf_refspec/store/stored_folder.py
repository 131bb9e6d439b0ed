r"""The stored folder: a config.json that names all its files, and the operations on them.

    config.json       what the folder is, and its files with sizes and checksums
    *.safetensors     its arrays, memory-mapped
    README.md         the card, on the Hub

Datastores, knowledge bases, kNN datastores and recycling tables are such folders. A file never
changes once config.json names it, and config.json is replaced atomically: a process that has the
folder open is not disturbed.

The config.json of each kind is one dataclass derived from [`FolderConfig`], in which a field's
annotation is its check:

```python
@dataclass(frozen=True)
class ShardEntry:
    tokens: Annotated[int, range(1, 100)]
    file: Annotated[FileEntry, re.compile(r"tokens-[0-9]{5}\.safetensors")]
```

A field is a `str`, an `int`, a `Literal` of strings, a `dict` of anything, another dataclass, a
`list` of these, or one of these or `None`. A range bounds an `int`, or the length of a `list`; a
pattern must match the whole name of a file entry, so that no name leads out of the folder.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from reprlib import repr as short
from types import NoneType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Generic,
    Literal,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

import numpy as np
from huggingface_hub import CommitInfo
from transformers import PreTrainedTokenizerBase

from ..corpus.untrusted import DatastoreError, read_small
from ..notebooks import html_table
from ..text_config import text_tokenizer
from . import hub
from .files import (
    CONFIG,
    FileEntry,
    check_file,
    copy_file,
    new_folder,
    sync_folder,
    write_bytes,
)
from .stored_tokenizer import check_tokenizer, public_name, tokenizer_fingerprint, vocabulary_size

if TYPE_CHECKING:
    from typing_extensions import Self

# No real JSON file comes near this size, even with 30,000 shards, or is nested as deep.
_LARGEST_JSON = 1 << 24
_DEEPEST_JSON = 20


@dataclass(frozen=True)
class FolderConfig:
    """The content of a config.json; derived classes declare it in their fields."""

    NOUN: ClassVar[str]  # what the folder is, for messages
    FORMAT_VERSION: ClassVar[int] = 1
    FILES: ClassVar[tuple[re.Pattern[str], ...]]  # the names that its files can have
    TEMPLATE: ClassVar[str]  # the file with the card's text
    HAS_TOKENIZERS_IDS: ClassVar[bool] = False  # whether `vocab_size` is the tokenizer's

    fingerprint: str
    tokenizer: str

    @classmethod
    def made_for(cls, tokenizer: PreTrainedTokenizerBase, **entries: Any) -> Self:
        """The config of a new folder for a tokenizer."""
        tokenizer = text_tokenizer(tokenizer)
        return cls(tokenizer_fingerprint(tokenizer), public_name(tokenizer), **entries)

    def check_tokenizer(self, path: Path, tokenizer: PreTrainedTokenizerBase, remedy: str) -> None:
        """Refuses a tokenizer that the folder at `path` was not made for."""
        tokenizer = text_tokenizer(tokenizer)
        check_tokenizer(path, tokenizer, remedy, self.fingerprint, self.tokenizer)
        found = vocabulary_size(tokenizer)
        stated = getattr(self, "vocab_size", None)
        if self.HAS_TOKENIZERS_IDS and stated != found:  # memory is allocated for each id
            raise DatastoreError(
                f"{path} is damaged: its vocab_size is {stated}, but its tokenizer has {found} ids"
            )

    @classmethod
    def _header(cls) -> dict[str, Any]:
        """The first entries of config.json, which tell whether this version can read the rest."""
        return {"kind": cls.NOUN, "format_version": cls.FORMAT_VERSION}

    def check(self) -> None:
        """Raises a ValueError if the fields, each valid by itself, do not fit together."""

    def files(self) -> list[FileEntry]:
        """All files of the folder but config.json."""
        return _entries_in(self)

    def check_files(self, folder: Path) -> None:
        """Compares all files with their checksums; raises a DatastoreError if one differs."""
        for entry in self.files():
            check_file(folder, entry)

    def card_texts(self) -> dict[str, str]:
        """Further texts for the card's template, after the fields and the entries of `source`."""
        return {}

    def write(self, folder: Path) -> None:
        """Replaces a folder's config.json atomically."""
        write_bytes(folder / CONFIG, self.as_json(folder))
        sync_folder(folder)

    def as_json(self, folder: Path) -> bytes:
        """The text of a folder's config.json; raises a DatastoreError if it could not be read."""
        try:
            text = (json.dumps(self._header() | asdict(self), indent=1) + "\n").encode()
            if len(text) > _LARGEST_JSON:
                raise ValueError(f"it would have {len(text):,} bytes, more than {_LARGEST_JSON:,}")
            self._parsed(json.loads(text))
        except (TypeError, ValueError) as error:
            raise DatastoreError(f"{folder / CONFIG} cannot be written: {error}") from None
        return text

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Reads a folder's config.json; raises a DatastoreError if this version cannot read it."""
        path = folder / CONFIG
        try:
            content = json.loads(read_small(path, _LARGEST_JSON))
        except (FileNotFoundError, NotADirectoryError):
            raise DatastoreError(f"{folder} is not a {cls.NOUN}: it has no {CONFIG}") from None
        except DatastoreError:
            raise
        except (ValueError, RecursionError) as error:
            raise DatastoreError(f"{path} is damaged: it is not JSON ({error})") from None
        content = content if isinstance(content, dict) else {}
        expected = cls._header()
        kind = content.get("kind")
        if isinstance(kind, str) and kind != cls.NOUN:
            kinds = f"{short(kind)}, not {cls.NOUN!r}"
            raise DatastoreError(f"{path} is of the kind {kinds}; name another folder")
        header = {key: content[key] for key in expected if key in content}
        if repr(header) != repr(expected):  # True equals 1
            raise DatastoreError(
                f"{path} does not describe a {cls.NOUN} that this hf_refspec reads: it has "
                f"{short(header)}, not {expected}; install the hf_refspec that it was made with, "
                "or build it again"
            )
        try:
            return cls._parsed(content)
        except ValueError as error:
            raise DatastoreError(f"{path} is damaged: {error}") from None

    @classmethod
    def _parsed(cls, content: dict[str, Any]) -> Self:
        """Raises a ValueError if the JSON object is not such a config."""
        if is_deeper(content, _DEEPEST_JSON):  # Python could not write it again
            raise ValueError("it is nested too deep")
        entries = {name: value for name, value in content.items() if name not in cls._header()}
        config: Self = _parse(cls, entries)
        names = [file.name for file in config.files()]
        if len(set(names)) < len(names):
            raise ValueError("it names a file twice")
        config.check()
        return config


C = TypeVar("C", bound=FolderConfig)
T = TypeVar("T")


class StoredFolder(Generic[C]):
    """A folder that is open: [`Datastore`], [`KnowledgeBase`] or [`KnnDatastore`].

    Attributes:
        path (`Path`): The folder.
        config ([`FolderConfig`]): Its config.json.
    """

    config_type: ClassVar[type[Any]]
    remedy: ClassVar[str] = "build one"
    path: Path
    config: C

    def __init__(self, path: str | os.PathLike, *arguments: Any) -> None:
        self.path = Path(path)
        self._arguments = arguments

        def opened(config: C) -> None:
            self.config = config
            self._open(config)

        self._read_with_retry(opened)

    def _open(self, config: C) -> None:
        """Opens the files that a config names."""

    def _read_with_retry(self, read: Callable[[C], T]) -> T:
        """Reads a config and by `read` its files; again if another process has replaced them."""
        config = self.config_type.read(self.path)
        while True:
            try:
                return read(config)
            except DatastoreError:
                failed = config
                config = self.config_type.read(self.path)
                if config == failed:
                    raise

    def _repr_html_(self) -> str:
        about: dict[str, Any] = {"path": self.path, "tokenizer": self.config.tokenizer}
        about |= {**getattr(self.config, "source", {}), **self.config.card_texts()}
        return html_table((name.replace("_", " "), text) for name, text in about.items() if text)

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
            *args: Further arguments of the class, such as the tokenizer.
            **options: Its further keyword arguments.

        Raises:
            OSError: If the folder or repo is missing or cannot be reached.
            DatastoreError: As the class.
        """
        folder = hub.fetch(
            repo_or_path,
            cls.config_type,
            lambda config: cls._part(config, *args, **options),
            revision,
            local_files_only,
            token=token,
            cache_dir=cache_dir,
        )
        return cls(folder, *args, **options)

    @classmethod
    def _part(cls, config: Any, *_: Any, **__: Any) -> Any:
        """The part of a config that the class, with these arguments, opens."""
        return config

    def save_pretrained(self, path: str | os.PathLike) -> None:
        """Copies all open files into a new folder.

        Raises:
            FileExistsError: If there is something at `path`.
            DatastoreError: If a file is damaged.
            OSError: If the folder cannot be written.
        """
        config = self._open_part
        with new_folder(path) as folder:
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
        """Publishes the folder as a dataset repo, in one commit, which is returned.

        The folder's README.md is the card; without one, a card is generated.

        Args:
            repo_id (`str`): Such as `"org/store"`; the repo is created if there is none. Without an
                owner it is yours.
            private (`bool`, *optional*): Makes a new repo private; by default as the owner of the
                account has set it.
            token (`str` or `bool`, *optional*): As in `huggingface_hub`.
            commit_message (`str`, *optional*): The first line of the commit's message.
            revision (`str`, *optional*): A branch; it is created if there is none.
            create_pr (`bool`, *optional*, defaults to `False`): Open a pull request instead of
                changing the branch.

        Raises:
            ValueError: If `repo_id` is not a name for a repo.
            DatastoreError: If a file is damaged.
            OSError: If the repo cannot be written; it is never left half changed.
        """
        return hub.push(
            self.path,
            self.config_type,
            repo_id,
            private=private,
            token=token,
            commit_message=commit_message,
            revision=revision,
            create_pr=create_pr,
        )

    def verify(self) -> None:
        """Compares all open files with their checksums; raises a DatastoreError if one differs."""
        self._open_part.check_files(self.path)

    @property
    def _open_part(self) -> FolderConfig:
        """The part of the config that is open."""
        part: FolderConfig = self._part(self.config, *self._arguments)
        return part

    def _damaged(self, entry: FileEntry, reason: str) -> DatastoreError:
        return DatastoreError(f"{self.path / entry.name} is damaged: {reason}")

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raises a DatastoreError for a tokenizer that the folder was not made for."""
        self.config.check_tokenizer(self.path, tokenizer, f"{self.remedy} for this tokenizer")


def token_dtype(vocab_size: int, separator: bool = True) -> np.dtype:
    """uint16 where it holds all tokens of a vocabulary and a separator, else uint32."""
    return np.dtype(np.uint16 if vocab_size + separator <= 2**16 else np.uint32)


def _entries_in(value: Any) -> list[FileEntry]:
    """All file entries in a dataclass or a list, at any depth, in the order of the fields."""
    if isinstance(value, FileEntry):
        return [value]
    if is_dataclass(value):
        value = list(vars(value).values())
    if not isinstance(value, list):
        return []
    return [entry for part in value for entry in _entries_in(part)]


def _parse(kind: Any, content: Any) -> Any:
    """A dataclass from a JSON object with its fields; those that may be `None` can be missing."""
    hints = _hints(kind)
    if not isinstance(content, dict):
        raise ValueError(f"{short(content)} should be an object that names {next(iter(hints))}")
    for name, hint in hints.items():
        if name not in content and NoneType not in get_args(hint):
            raise ValueError(f"it does not name {name}")
    for name in content:
        if name not in hints:
            raise ValueError(f"{short(name)} is not a name that belongs there")
    return kind(**{name: _value(name, content.get(name), hint) for name, hint in hints.items()})


@cache
def _hints(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind, include_extras=True)
    return {field.name: hints[field.name] for field in fields(kind)}


def _value(name: str, value: Any, hint: Any) -> Any:
    """The value of a field, checked; objects are turned into dataclasses."""
    if NoneType in get_args(hint):
        if value is None:
            return None
        hint = get_args(hint)[0]
    allowed: Any = None
    if get_origin(hint) is Annotated:
        hint, allowed = get_args(hint)
    if is_dataclass(hint):
        entry = _parse(hint, value)
        if allowed is not None and not allowed.fullmatch(entry.name):
            raise ValueError(f"{short(entry.name)} is not the name of a {name} in its folder")
        return entry
    if get_origin(hint) is list and type(value) is list:
        if allowed is not None and len(value) not in allowed:
            raise ValueError(f"{name} has {len(value)} entries, more than {allowed[-1]}")
        (item,) = get_args(hint)
        return [_value(f"{name}[{i}]", part, item) for i, part in enumerate(value)]
    if get_origin(hint) is Literal:
        fits = value in get_args(hint)
    else:
        fits = type(value) is (get_origin(hint) or hint)  # True is not an int
    if not fits or (allowed is not None and value not in allowed):
        raise ValueError(f"{name} is {short(value)}")
    return value


def is_deeper(value: Any, levels: int) -> bool:
    """True if lists and dicts are nested in more levels."""
    if not isinstance(value, dict | list):
        return False
    children = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(is_deeper(child, levels - 1) for child in children)
