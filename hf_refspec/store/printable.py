"""Text from untrusted files, escaped for messages and terminals."""

from __future__ import annotations


def printable(text: object) -> str:
    """Escapes the control characters of a text as Python does, such as `\\x1b`: a terminal would
    take some of them for commands."""
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in str(text)
    )


def one_line(error: BaseException) -> str:
    """The message of an error in one line."""
    return printable(" ".join(str(error).split()))
