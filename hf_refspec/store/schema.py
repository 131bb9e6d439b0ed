"""The content of a JSON file, declared by a dataclass: the annotation of a field is its check.

```python
@dataclass(frozen=True)
class ShardEntry:
    tokens: Annotated[int, range(1, 100)]
    file: Annotated[FileEntry, re.compile(r"tokens-[0-9]{5}\\.safetensors")]
```

A field is a `str`, an `int`, a `Literal` of strings, a `dict` of anything, another dataclass, a
`list` of these, or one of these or `None`. A range bounds an `int`, or the length of a `list`; a
pattern must match the whole name of a file entry, so that no name leads out of the folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from reprlib import repr as short
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")


def parse(kind: type[T], content: Any) -> T:
    """Turns a JSON object with exactly the fields of a dataclass into an instance of it."""
    hints = _hints(cast(Any, kind))
    if not isinstance(content, dict):
        raise ValueError(f"{short(content)} should be an object that names {next(iter(hints))}")
    if missing := sorted(hints.keys() - content.keys()):
        raise ValueError(f"it does not name {missing[0]}")
    if unknown := sorted(content.keys() - hints.keys()):
        raise ValueError(f"{short(unknown[0])} is not a name that belongs there")
    return kind(**{name: _value(name, content[name], hint) for name, hint in hints.items()})


def values_of(kind: type[T], parsed: Any) -> Iterator[T]:
    """All instances of a dataclass inside another one, at any depth, in the order of the fields."""
    if isinstance(parsed, kind):
        yield parsed
    elif is_dataclass(parsed) or isinstance(parsed, list):
        for value in parsed if isinstance(parsed, list) else vars(parsed).values():
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
    allowed: Any = None
    if get_origin(hint) is Annotated:
        hint, allowed = get_args(hint)
    if is_dataclass(hint):
        entry: Any = parse(cast(Any, hint), value)
        if allowed is not None and not allowed.fullmatch(entry.name):
            raise ValueError(f"{short(entry.name)} is not the name of a {name} in its folder")
        return entry
    kind = get_origin(hint) or hint
    if kind is Literal:
        fits = value in get_args(hint)
    else:
        fits = isinstance(value, kind) and not isinstance(value, bool)
    if not fits:
        raise ValueError(f"{name} is {short(value)}")
    if kind is list:
        if allowed is not None and len(value) not in allowed:
            raise ValueError(f"{name} has {len(value)} entries, more than {allowed[-1]}")
        (inner,) = get_args(hint)
        return [_value(f"{name}[{i}]", each, inner) for i, each in enumerate(value)]
    if allowed is not None and value not in allowed:
        raise ValueError(f"{name} is {short(value)}")
    return value


def is_deeper(value: Any, levels: int) -> bool:
    """Whether lists and dicts are nested in more levels."""
    if not isinstance(value, dict | list):
        return False
    children = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(is_deeper(each, levels - 1) for each in children)
