"""Where documents are tokenised and shards are sorted: on this machine or on a Ray cluster."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from transformers import PreTrainedTokenizerBase

from ...index.suffix_array import build_suffix_array
from ..datastore_config import StoreConfig
from ..tokenizer_file import load_backend
from .read_ahead import in_order
from .source import Source, after, batches
from .tokenizing import Document, TokenBatch, encode

if TYPE_CHECKING:
    from .ray_engine import RayEngine

Engine: TypeAlias = "LocalEngine | RayEngine"


class LocalEngine:
    """Tokenises in threads: the tokenizer works without the interpreter's lock.

    Args:
        content (`str`): The tokenizer's tokenizer.json.
        config (`StoreConfig`): The token type, the separator and the size of the vocabulary.
        num_proc (`int`, *optional*): How many threads. By default one for each usable core.
    """

    def __init__(self, content: str, config: StoreConfig, num_proc: int | None) -> None:
        self._content, self._config = content, config
        self._num_proc = num_proc or usable_cores()
        # Each thread has its own: a tokenizer's cache of words has one lock.
        self._local = threading.local()

    def tokenize(self, source: Source, skip: int) -> Iterator[TokenBatch]:
        """Tokenises the documents of a source except the first `skip`, in order."""
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
        """The suffix array of a shard."""
        return build_suffix_array(tokens)  # without the interpreter's lock

    def close(self) -> None:
        """Nothing is left to be ended."""

    def _encode(self, batch: list[Document]) -> TokenBatch:
        if not hasattr(self._local, "tokenizer"):
            self._local.tokenizer = load_backend(self._content)
        return encode(
            self._local.tokenizer, batch, self._config.token_dtype, self._config.separator
        )


def make_engine(
    name: str, num_proc: int | None, config: StoreConfig, tokenizer: PreTrainedTokenizerBase
) -> Engine:
    """The engine of that name; nothing is started yet."""
    content = tokenizer.backend_tokenizer.to_str()
    if name == "local":
        return LocalEngine(content, config, num_proc)
    if name == "ray":
        from .ray_engine import RayEngine

        return RayEngine(content, config, num_proc)
    raise ValueError(f"engine must be 'local' or 'ray', but is {name!r}")


def usable_cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
