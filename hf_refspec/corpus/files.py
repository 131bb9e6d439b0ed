"""Text from untrusted files, escaped for messages and terminals."""

from __future__ import annotations


def printable(text: object) -> str:
    """Escapes control characters as Python does, such as `\\x1b`: they can command a terminal."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in str(text)
    )


def one_line(error: BaseException) -> str:
    """The message of an error in one line."""
    return printable(" ".join(str(error).split()))
