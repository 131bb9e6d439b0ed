"""Errors of the library in the words of the command line."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterable

_NOT_IN_A_PATH = r"(?<![\w/.-])"


def in_options(message: str, args: Namespace, commands: Iterable[str]) -> str:
    """A message with the options of a command in place of Python's arguments, and commands in place
    of functions: `max_bytes=100` becomes `--max-bytes 100`, `compact()` `hf-refspec compact`."""
    for name in vars(args):
        option, word = f"--{name.replace('_', '-')}", _NOT_IN_A_PATH + name
        message = re.sub(rf"{word}=True\b", option, message)
        message = re.sub(rf"{word}=(?=[\w'\"])", f"{option} ", message)
        message = re.sub(rf"{word}=", option, message)
        if "_" in name:  # others are words of their own
            message = re.sub(rf"{word}(?![\w/-]|\.\w)", option, message)
    for command in commands:
        message = re.sub(rf"{_NOT_IN_A_PATH}{command}\(\)", f"hf-refspec {command}", message)
    return message
