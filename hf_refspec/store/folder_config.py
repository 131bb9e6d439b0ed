r"""The config.json of a stored folder.

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
import re
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
    Literal,
    get_args,
    get_origin,
    get_type_hints,
)

import numpy as np
from transformers import PreTrainedTokenizerBase

from ..corpus.tokenise import vocabulary_size
from ..corpus.untrusted import DatastoreError, read_small
from ..text_config import text_tokenizer
from .files import CONFIG, FileEntry, check_file, sync_folder, write_bytes
from .stored_tokenizer import check_tokenizer, public_name, tokenizer_fingerprint

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
    REMEDY: ClassVar[str] = "build one"  # where it was made for another tokenizer
    FILES: ClassVar[tuple[re.Pattern[str], ...]]  # the names that its files can have
    HAS_TOKENIZERS_IDS: ClassVar[bool] = False  # whether `vocab_size` is the tokenizer's

    fingerprint: str
    tokenizer: str

    @classmethod
    def made_for(cls, tokenizer: PreTrainedTokenizerBase, **entries: Any) -> Self:
        """The config of a new folder for a tokenizer."""
        tokenizer = text_tokenizer(tokenizer)
        return cls(tokenizer_fingerprint(tokenizer), public_name(tokenizer), **entries)

    def check_tokenizer(self, path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        """Refuses a tokenizer that the folder at `path` was not made for."""
        tokenizer = text_tokenizer(tokenizer)
        remedy = f"{self.REMEDY} for this tokenizer"
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
            text = read_small(path, _LARGEST_JSON)
        except (FileNotFoundError, NotADirectoryError):
            raise DatastoreError(f"{folder} is not a {cls.NOUN}: it has no {CONFIG}") from None
        try:
            content = json.loads(text)
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
