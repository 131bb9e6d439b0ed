"""What every decoding loop of this package refuses, in the name of the one that was asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def refusals_of(loop: str) -> Iterator[None]:
    """Has the checks of `validation.py`, which speak of `candidate_generator`, speak of `loop`.

    Raises:
        ValueError: The one that was raised inside, in other words.
    """
    try:
        yield
    except ValueError as error:
        message = str(error).replace("`candidate_generator`", f"`{loop}`")
        raise ValueError(message) from None
