"""The parser of each command, and errors in the words of the command line."""

from __future__ import annotations

import re
from argparse import Action, ArgumentError, ArgumentParser, Namespace
from collections.abc import Iterable
from typing import Any, NoReturn

from ...did_you_mean import did_you_mean

_NOT_IN_A_PATH = r"(?<![\w/.-])"


class Parser(ArgumentParser):
    """An `ArgumentParser` whose errors come with its own usage, and say what may be meant; its
    commands are parsers of this class too."""

    _given: list[str]

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuses unknown arguments itself: the parser above would print its own usage."""
        self._given = list(args)
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return namespace, unknown

    def error(self, message: str) -> NoReturn:
        """Says which options may be misspelt, whatever the error: one that is required is missing
        then."""
        options = self._option_string_actions
        if self._subparsers is None:  # otherwise a command's own options are among the given
            for name in (each.partition("=")[0] for each in self._given if each.startswith("--")):
                if not any(option.startswith(name) for option in options):
                    hint = did_you_mean(name, options)
                    message += f"; there is no {name}{hint}" if hint else ""
        super().error(message)

    def _check_value(self, action: Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except ArgumentError as error:
            error.message += did_you_mean(str(value), map(str, action.choices or ()))
            raise


def in_options(message: str, args: Namespace, of_store: Iterable[str]) -> str:
    """A message with the options of a command in place of Python's arguments, and commands in place
    of a datastore's methods: `max_bytes=100` becomes `--max-bytes 100`, and `compact()` becomes
    `hf-refspec store compact`."""
    for name in vars(args):
        option, word = f"--{name.replace('_', '-')}", _NOT_IN_A_PATH + name
        message = re.sub(rf"{word}=True\b", option, message)
        message = re.sub(rf"{word}=(?=[\w'\"])", f"{option} ", message)
        message = re.sub(rf"{word}=", option, message)
        if "_" in name:  # others are words of their own
            message = re.sub(rf"{word}(?![\w/-]|\.\w)", option, message)
    for command in of_store:
        message = re.sub(rf"{_NOT_IN_A_PATH}{command}\(\)", f"hf-refspec store {command}", message)
    return message
