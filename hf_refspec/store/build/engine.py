"""Where documents are tokenised and shards are sorted: on this machine or on a Ray cluster."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from .source import Source
from .tokenizing import TokenBatch

W = TypeVar("W")
P = TypeVar("P")


class TokenFormat(NamedTuple):
    """How documents become tokens.

    Attributes:
        content (`str`): The tokenizer's tokenizer.json.
        dtype (`np.dtype`): The type of the tokens.
        separator (`int`): Stands after each document.
        vocab_size (`int`): All ids are below it.
    """

    content: str
    dtype: np.dtype
    separator: int
    vocab_size: int


class Engine(Protocol):
    """Where the work is done."""

    def tokenize(self, source: Source, skip: int) -> Iterator[TokenBatch]:
        """Tokenises the documents of a source but the first `skip`, in order."""

    def sort(self, tokens: np.ndarray) -> np.ndarray:
        """Makes the suffix array of a shard."""

    def close(self) -> None:
        """Ends what it has started."""


def make_engine(name: str, tokens: TokenFormat, num_proc: int | None) -> Engine:
    """Makes the engine of that name; nothing is started yet."""
    if name == "local":
        from .local_engine import LocalEngine

        return LocalEngine(tokens, num_proc)
    if name == "ray":
        from .ray_engine import RayEngine

        return RayEngine(tokens, num_proc)
    raise ValueError(f"engine must be 'local' or 'ray', but is {name!r}")


def in_order(
    work: Iterable[W], begin: Callable[[W], P], ahead: int, cancel: Callable[[P], object]
) -> Generator[P, None, None]:
    """Begins work ahead of time; what it promises comes out in the order of the work.

    Args:
        work (iterable): What is to be done.
        begin (`Callable`): Begins a piece of work.
        ahead (`int`): How many pieces are begun before the first one is taken.
        cancel (`Callable`): Called with all that is begun and not done with, if this is closed.
    """
    begun: deque[P] = deque()
    try:
        for piece in work:
            begun.append(begin(piece))
            if len(begun) > ahead:
                yield begun[0]
                begun.popleft()
        while begun:
            yield begun[0]
            begun.popleft()
    finally:
        for promise in begun:
            cancel(promise)
