"""What others have written, made fit for messages and terminals."""

from __future__ import annotations


def printable(text: object) -> str:
    """A text in which control characters are written as Python writes them, `\\x1b` for one.

    A terminal takes some of them for commands: what a folder's config.json, a file's name or a
    document says must not colour, overwrite or rename what is on the screen.
    """
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in str(text)
    )


def one_line(error: BaseException) -> str:
    """What an error says, in one line."""
    return printable(" ".join(str(error).split()))
