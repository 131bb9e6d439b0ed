"""Where documents are tokenised and shards are sorted: on this machine or on a Ray cluster."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import numpy as np
from transformers import PreTrainedTokenizerBase

from ...index.suffix_array import build_suffix_array
from ..datastore_config import StoreConfig
from ..tokenizer_file import load_backend
from .source import batches
from .tokenizing import Document, TokenBatch, encode

if TYPE_CHECKING:
    from .ray_engine import RayEngine

Engine: TypeAlias = "LocalEngine | RayEngine"
W = TypeVar("W")
P = TypeVar("P")


class LocalEngine:
    """Tokenises in threads: the tokenizer releases the interpreter's lock."""

    def __init__(self, content: str, config: StoreConfig, num_proc: int | None) -> None:
        self._content, self._config = content, config
        self._num_proc = num_proc or usable_cores()
        # One tokenizer for each thread: a tokenizer locks its cache of words.
        self._local = threading.local()

    def tokenize(self, documents: Iterator[Document]) -> Iterator[TokenBatch]:
        """Tokenises documents in order."""
        threads = ThreadPoolExecutor(self._num_proc)

        def begin(batch: list[Document]) -> Future[TokenBatch]:
            return threads.submit(self._encode, batch)

        try:
            for encoded in in_order(batches(documents), begin, 2 * self._num_proc, Future.cancel):
                yield encoded.result()
        finally:
            threads.shutdown(cancel_futures=True)

    def sort(self, tokens: np.ndarray) -> np.ndarray:
        """The suffix array of a shard."""
        return build_suffix_array(tokens)  # releases the interpreter's lock

    def close(self) -> None:
        """Does nothing."""

    def _encode(self, batch: list[Document]) -> TokenBatch:
        if not hasattr(self._local, "tokenizer"):
            self._local.tokenizer = load_backend(self._content)
        return encode(
            self._local.tokenizer, batch, self._config.token_dtype, self._config.separator
        )


def make_engine(
    name: str, num_proc: int | None, config: StoreConfig, tokenizer: PreTrainedTokenizerBase
) -> Engine:
    """The engine of that name; it starts nothing yet."""
    content = tokenizer.backend_tokenizer.to_str()
    if name == "local":
        return LocalEngine(content, config, num_proc)
    if name == "ray":
        from .ray_engine import RayEngine

        return RayEngine(content, config, num_proc)
    raise ValueError(f"engine must be 'local' or 'ray', but is {name!r}")


def in_order(
    work: Iterable[W], begin: Callable[[W], P], ahead: int, cancel: Callable[[P], object]
) -> Generator[P, None, None]:
    """Calls `begin` for up to `ahead` pieces of work early and yields the results in order; calls
    `cancel` for the remaining ones when it is closed."""
    begun: deque[P] = deque()
    try:
        for piece in work:
            begun.append(begin(piece))
            del piece  # it may be large
            if len(begun) > ahead:
                yield begun[0]
                begun.popleft()
        while begun:
            yield begun[0]
            begun.popleft()
    finally:
        for promise in begun:
            cancel(promise)


def usable_cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
