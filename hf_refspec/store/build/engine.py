"""Documents are tokenised and shards are sorted: on this machine or on a Ray cluster."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import lru_cache
from typing import Any, TypeAlias, TypeVar

import numpy as np
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from ...extras import require
from ...index.suffix_array import build_suffix_array
from ..datastore_config import StoreConfig
from ..printable import one_line
from ..stored_tokenizer import TokenizerError, is_of_tokenizer, load_backend
from .source import Document, batches

Engine: TypeAlias = "LocalEngine | RayEngine"
W = TypeVar("W")
P = TypeVar("P")
# The length of each document with its separator (0 for an empty one), and all tokens in a row.
TokenBatch: TypeAlias = tuple[np.ndarray, np.ndarray]

# The tokenizer needs about 130 bytes for each character of a piece.
LONGEST_PIECE = 1 << 20


@contextmanager
def open_engine(
    name: str, num_proc: int | None, config: StoreConfig, tokenizer: PreTrainedTokenizerBase
) -> Iterator[Engine]:
    """Yields the engine of that name; starts Ray if it is not running yet, and then stops it at
    the end."""
    content = tokenizer.backend_tokenizer.to_str()
    if name == "local":
        yield LocalEngine(content, config, num_proc)
        return
    if name != "ray":
        raise ValueError(f"engine must be 'local' or 'ray', but is {name!r}")
    ray = require("ray", "engine='ray'", "ray")
    starts = not ray.is_initialized()
    if starts:
        ray.init(include_dashboard=False)
    try:
        yield RayEngine(ray, content, config, num_proc)
    finally:
        if starts:
            ray.shutdown()


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

    def _encode(self, batch: list[Document]) -> TokenBatch:
        if not hasattr(self._local, "tokenizer"):
            self._local.tokenizer = load_backend(self._content)
        return encode(
            self._local.tokenizer, batch, self._config.token_dtype, self._config.separator
        )


class RayEngine:
    """Tokenises and sorts in Ray tasks."""

    def __init__(self, ray: Any, content: str, config: StoreConfig, num_proc: int | None) -> None:
        self._ray = ray
        # Ray passes a reference inside a list on as it is: each worker fetches it once.
        self._setup = [ray.put((content, config))]
        self._width = num_proc or max(1, int(ray.cluster_resources().get("CPU", 1)))

    def tokenize(self, documents: Iterator[Document]) -> Iterator[TokenBatch]:
        """See [`LocalEngine.tokenize`]."""
        task = self._ray.remote(_encode_batch)

        def begin(batch: list[Document]) -> Any:
            return task.remote(batch, self._setup)

        begun = in_order(batches(documents), begin, 2 * self._width, self._ray.cancel)
        with closing(begun):
            yield from map(self._ray.get, begun)

    def sort(self, tokens: np.ndarray) -> np.ndarray:
        """See [`LocalEngine.sort`]."""
        # It reserves no core: all can be taken by tasks that wait for this shard to be sorted.
        task = self._ray.remote(num_cpus=0)(build_suffix_array)
        return self._ray.get(task.remote(tokens))


def _encode_batch(batch: list[Document], setup: list[Any]) -> TokenBatch:
    tokenizer, config = _fetched(setup[0])
    return encode(tokenizer, batch, config.token_dtype, config.separator)


@lru_cache(maxsize=1)
def _fetched(reference: Any) -> tuple[Tokenizer, StoreConfig]:
    """The tokenizer, loaded once in each process of Ray, and the datastore's config."""
    import ray

    content, config = ray.get(reference)
    return load_backend(content), config


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


def encode(
    tokenizer: Tokenizer, documents: list[Document], dtype: np.dtype, separator: int
) -> TokenBatch:
    """Tokenises a batch of documents without special tokens, and puts `separator` after each that
    is not empty. Raises a TokenizerError if the tokenizer fails.

    A text of more than a million characters is tokenised in pieces, to save memory and time; the
    tokens where two pieces meet can differ.
    """
    lengths = np.zeros(len(documents), np.int64)
    tokens: list[np.ndarray] = []
    end = np.array([separator], dtype)
    for number, document in enumerate(documents):
        if isinstance(document, str):
            encoded = (
                tokenizer.encode_batch_fast([piece], add_special_tokens=False)[0]
                for piece in pieces(document)
            )
            try:
                parts = [np.array(each.ids, dtype) for each in encoded]
            except BaseException as error:
                if not is_of_tokenizer(error):
                    raise
                raise TokenizerError(
                    f"the tokenizer fails on a text, {document[:60]!r}: {one_line(error):.200}"
                ) from None
        else:
            parts = [document.astype(dtype)]
        length = sum(map(len, parts))
        if length:
            lengths[number] = length + 1
            tokens += [*parts, end]
    return lengths, np.concatenate(tokens) if tokens else np.empty(0, dtype)


def pieces(text: str, longest: int = LONGEST_PIECE) -> Iterator[str]:
    """Cuts a text that is too long to be tokenised at once, at the ends of lines if possible."""
    start = 0
    while len(text) - start > longest:
        end = text.rfind("\n", start, start + longest) + 1 or start + longest
        yield text[start:end]
        start = end
    yield text[start:]
