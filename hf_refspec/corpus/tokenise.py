"""Documents are tokenised and shards are sorted: on this machine or on a Ray cluster."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple, TypeAlias

import numpy as np
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from ...extras import require
from ...index.suffix_array import build_suffix_array
from ..datastore_config import StoreConfig
from ..stored_tokenizer import load_backend, naming_failures
from .source import Document, batches

# The length of each document with its separator (0 for an empty one), and all tokens in a row.
TokenBatch: TypeAlias = tuple[np.ndarray, np.ndarray]

# The tokenizer needs about 130 bytes for each character of a piece.
LONGEST_PIECE = 1 << 20
# A tokenizer locks its cache of words, so that each thread needs its own.
_of_thread = threading.local()


class Engine(NamedTuple):
    """Tokenises batches of documents, several at a time, and sorts shards."""

    encode: Callable[[list[Document]], Future[TokenBatch]]
    sort: Callable[[np.ndarray], np.ndarray]  # returns the suffix array
    width: int  # batches at a time

    def tokenize(self, documents: Iterable[Document]) -> Iterator[TokenBatch]:
        """Tokenises documents in order, and the pieces of a long text beside each other."""
        begun: deque[list[Future[TokenBatch]]] = deque()
        for batch in batches(documents):
            parts: list[list[Document]] = [batch]
            if len(batch) == 1 and isinstance(batch[0], str):
                parts = [[piece] for piece in pieces(batch[0])]
            begun.append([self.encode(part) for part in parts])
            if len(begun) > 2 * self.width:
                yield _joined([part.result() for part in begun.popleft()])
        while begun:
            yield _joined([part.result() for part in begun.popleft()])


def _joined(parts: list[TokenBatch]) -> TokenBatch:
    """The tokens of one document from those of its pieces, each of which has a separator."""
    filled = [tokens for _, tokens in parts if len(tokens)]
    if len(parts) == 1 or not filled:
        return parts[0]
    tokens = np.concatenate([*(piece[:-1] for piece in filled), filled[-1][-1:]])
    return np.array([len(tokens)]), tokens


@contextmanager
def open_engine(
    name: str, num_proc: int | None, config: StoreConfig, tokenizer: PreTrainedTokenizerBase
) -> Iterator[Engine]:
    """Yields local threads, or tasks of Ray, which is started and stopped unless it is running."""
    content = tokenizer.backend_tokenizer.to_str()
    dtype = config.token_dtype
    separator = config.separator
    if name == "local":
        width = num_proc or usable_cores()
        threads = ThreadPoolExecutor(width)
        try:
            yield Engine(
                lambda batch: threads.submit(_encode, content, batch, dtype, separator),
                build_suffix_array,
                width,
            )
        finally:
            threads.shutdown(cancel_futures=True)
        return
    if name != "ray":
        raise ValueError(f"engine must be 'local' or 'ray', but is {name!r}")
    ray = require("ray", "engine='ray'", "ray")
    starts = not ray.is_initialized()
    if starts:
        ray.init(include_dashboard=False)
    try:
        encode = ray.remote(_encode)
        shared = ray.put(content)
        # It reserves no core: all can be taken by tasks that wait for this shard to be sorted.
        sort = ray.remote(num_cpus=0)(build_suffix_array)
        yield Engine(
            lambda batch: encode.remote(shared, batch, dtype, separator).future(),
            lambda tokens: ray.get(sort.remote(tokens)),
            num_proc or max(1, int(ray.cluster_resources().get("CPU", 1))),
        )
    finally:
        if starts:
            ray.shutdown()


def _encode(content: str, batch: list[Document], dtype: np.dtype, separator: int) -> TokenBatch:
    if getattr(_of_thread, "content", None) != content:
        _of_thread.content = content
        _of_thread.tokenizer = load_backend(content)
    return encode(_of_thread.tokenizer, batch, dtype, separator)


def usable_cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def encode(
    tokenizer: Tokenizer, documents: list[Document], dtype: np.dtype, separator: int
) -> TokenBatch:
    """Tokenises a batch of documents without special tokens, and puts `separator` after each that
    is not empty. Where two pieces of a very long text meet, tokens can differ from those of the
    whole text."""
    lengths = np.zeros(len(documents), np.int64)
    tokens: list[np.ndarray] = []
    end = np.array([separator], dtype)
    for number, document in enumerate(documents):
        if isinstance(document, str):
            with naming_failures(f"the tokenizer fails on a text, {document[:60]!r}"):
                parts = [
                    np.array(encoding.ids, dtype)
                    for piece in pieces(document)
                    for encoding in tokenizer.encode_batch_fast([piece], add_special_tokens=False)
                ]
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
