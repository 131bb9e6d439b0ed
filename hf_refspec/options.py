"""Options of a command, each stated once: the fields of a dataclass, from which argparse follows.

A field's type says how its option is read: `bool` is a flag, `int` a number from 1 on, `Literal` a
choice, a list takes several values. `Annotated[..., Option(...)]` has what else there is to know;
what stands after it there is put into the help.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints


class Option:
    """What there is to know of an option beside its name, its type and its default.

    Args:
        help (`str`, *optional*): For the command line.
        positional (`bool`, *optional*, defaults to `False`): Whether it has no `--name`.
        argument: More for `ArgumentParser.add_argument`.
    """

    def __init__(
        self, help: str | None = None, *, positional: bool = False, **argument: Any
    ) -> None:
        self.positional = positional
        self.argument = {"help": help, **argument}


def flag(field: Field) -> str:
    """The name of a field on the command line."""
    return f"--{field.name.replace('_', '-')}"


def positive(text: str) -> int:
    """Reads a number from 1 on."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, but is {number}")
    return number


def stated(command: type) -> Iterator[tuple[Any, ...]]:
    """The fields of a command's dataclass, each with its type and all that was stated of it."""
    hints = get_type_hints(command, include_extras=True)
    for field in fields(command):
        yield (field, *get_args(hints[field.name]))


def add_options(parser: argparse.ArgumentParser, command: type) -> None:
    """Adds the fields of a command's dataclass to its parser."""
    for field, kind, option, *more in stated(command):
        argument = {**_reading(kind), **option.argument}
        if more:
            argument["help"] = f"{argument['help']} ({', '.join(map(str, more))})"
        if option.positional:
            parser.add_argument(field.name, **argument)
            continue
        if argument.get("action") != "store_true":
            argument["required"] = field.default is field.default_factory is MISSING
            argument["default"] = [] if field.default is MISSING else field.default
        parser.add_argument(flag(field), **argument)


def _reading(hint: Any) -> dict[str, Any]:
    """How argparse reads a value of some type."""
    if hint is bool:
        return {"action": "store_true"}
    if get_origin(hint) is Literal:
        return {"choices": get_args(hint)}
    if get_args(hint):  # a list, or what may be None as well
        return _reading(get_args(hint)[0])
    return {"type": positive, "metavar": "N"} if hint is int else {"type": hint}
