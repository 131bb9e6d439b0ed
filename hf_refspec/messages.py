"""Messages: numbers with nouns, hints for names, refused counts and ids, missing packages."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from importlib import import_module
from numbers import Integral
from typing import Any


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """A number and its noun, such as "1 prompt" or "2,000 prompts"."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: a known one that is close to it, if any."""
    close = get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def check_count(
    name: str, value: Any, otherwise: str = "", least: int = 1, most: int | None = None
) -> None:
    """Refuses an option that is not a whole number, from `least` to `most`."""
    is_whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not is_whole:
        raise TypeError(f"{name} must be an int{otherwise}, but is {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, but is {value}")
    if most is not None and value > most:
        raise ValueError(f"{name} must be at most {most}, but is {value}")


def check_ids(
    name: object,
    largest_id: int,
    vocab_size: int,
    remedy: str,
    error: type[ValueError] = ValueError,
) -> None:
    """Refuses texts with an id that a model does not have."""
    if largest_id >= vocab_size:
        raise error(
            f"{name} has the id {largest_id}, outside of the target model's vocabulary of "
            f"{vocab_size}; {remedy}"
        )


def require(package: str, needed_by: str, extra: str) -> Any:
    """Imports a package of an extra; raises an ImportError that says how to install it."""
    try:
        return import_module(package)
    except ImportError:
        raise ImportError(
            f'{needed_by} needs {package}: pip install "hf_refspec[{extra}]"'
        ) from None
