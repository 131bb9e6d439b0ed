"""Tokenises and sorts on this machine."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from ...index.suffix_array import build_suffix_array
from .engine import TokenFormat, in_order
from .source import Source, after, batches
from .tokenizing import Document, TokenBatch, encode, load_tokenizer


class LocalEngine:
    """Tokenises in threads: the tokenizer works without the interpreter's lock.

    Args:
        tokens (`TokenFormat`): What documents become.
        num_proc (`int`, *optional*): How many threads. By default one for each usable core.
    """

    def __init__(self, tokens: TokenFormat, num_proc: int | None) -> None:
        self._tokens = tokens
        self._num_proc = num_proc or usable_cores()
        # Each thread has its own: what a tokenizer remembers of words has one lock.
        self._local = threading.local()

    def tokenize(self, source: Source, skip: int) -> Iterator[TokenBatch]:
        """Tokenises the documents of a source but the first `skip`, in order."""
        threads = ThreadPoolExecutor(self._num_proc)

        def begin(batch: list[Document]) -> Future[TokenBatch]:
            return threads.submit(self._encode, batch)

        work = batches(after(source.documents, skip))
        try:
            for encoded in in_order(work, begin, 2 * self._num_proc, Future.cancel):
                yield encoded.result()
        finally:
            threads.shutdown(cancel_futures=True)

    def sort(self, tokens: np.ndarray) -> np.ndarray:
        """Makes the suffix array of a shard."""
        return build_suffix_array(tokens)  # without the interpreter's lock

    def close(self) -> None:
        """Nothing is left to be ended."""

    def _encode(self, batch: list[Document]) -> TokenBatch:
        if not hasattr(self._local, "tokenizer"):
            self._local.tokenizer = load_tokenizer(self._tokens.content)
        return encode(self._local.tokenizer, batch, self._tokens.dtype, self._tokens.separator)


def usable_cores() -> int:
    """The number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
