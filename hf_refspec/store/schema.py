"""The content of a JSON file, declared by a dataclass: the annotation of a field is its check.

```python
@dataclass(frozen=True)
class ShardEntry:
    tokens: Annotated[int, range(1, 100)]
    file: Annotated[FileEntry, Named("a file of tokens", r"tokens-[0-9]{5}\\.safetensors")]
```

A field is a `str`, an `int`, a `Literal` of strings, a `dict` of anything, another dataclass, a
`list` of these, or one of these or `None`. A range bounds an `int`, or the length of a `list`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from reprlib import repr as short
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")

_DEEPEST_DICT = 20


@dataclass(frozen=True)
class Named:
    """A file entry's whole name must match `pattern`, so that no name leads out of the folder;
    `kind` says what such a file is, for messages."""

    kind: str
    pattern: str

    def matches(self, name: str) -> bool:
        return re.fullmatch(self.pattern, name) is not None


def parse(kind: type[T], content: Any) -> T:
    """Turns a JSON object with exactly the fields of a dataclass into an instance of it."""
    hints = _hints(cast(Any, kind))
    if not isinstance(content, dict):
        raise ValueError(f"{short(content)} should be an object that names {next(iter(hints))}")
    parsed = {name: _value(name, content[name], hint) for name, hint in hints.items()}
    unknown = sorted(content.keys() - parsed.keys())
    if unknown:
        raise ValueError(f"{short(unknown[0])} is not a name that belongs there")
    return kind(**parsed)


def values_of(kind: type[T], parsed: Any) -> Iterator[T]:
    """All instances of a dataclass inside another one, at any depth, in the order of the fields."""
    if isinstance(parsed, kind):
        yield parsed
    elif is_dataclass(parsed):
        for each in fields(parsed):
            yield from values_of(kind, getattr(parsed, each.name))
    elif isinstance(parsed, list):
        for value in parsed:
            yield from values_of(kind, value)


@cache
def _hints(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind, include_extras=True)
    return {each.name: hints[each.name] for each in fields(kind)}


def _value(name: str, value: Any, hint: Any) -> Any:
    """Checks the value of a field and turns the objects in it into dataclasses."""
    if NoneType in get_args(hint):
        if value is None:
            return None
        (hint,) = (each for each in get_args(hint) if each is not NoneType)
    check: Any = None
    if get_origin(hint) is Annotated:
        hint, check = get_args(hint)
    origin = get_origin(hint) or hint
    if is_dataclass(hint):
        value = parse(cast(Any, hint), value)
        if check is not None and not check.matches(value.name):
            raise ValueError(f"{short(value.name)} is not the name of {check.kind} in its folder")
    elif origin is list and isinstance(value, list):
        if check is not None and len(value) not in check:
            raise ValueError(f"{name} has {len(value)} entries, more than {check[-1]}")
        (inner,) = get_args(hint)
        value = [_value(f"{name}[{i}]", each, inner) for i, each in enumerate(value)]
    elif not _fits(value, hint, origin) or (check is not None and value not in check):
        raise ValueError(f"{name} is {short(value)}")
    elif is_deeper(value, _DEEPEST_DICT):  # Python could not write it again
        raise ValueError(f"{name} is nested too deep")
    return value


def _fits(value: Any, hint: Any, origin: Any) -> bool:
    if origin is Literal:
        return isinstance(value, str) and value in get_args(hint)
    return isinstance(value, origin) and not isinstance(value, bool)


def is_deeper(value: Any, levels: int) -> bool:
    """Whether lists and dicts are nested in more levels."""
    if not isinstance(value, dict | list):
        return False
    children = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(is_deeper(each, levels - 1) for each in children)
