"""Tokenises and sorts on a Ray cluster."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from ...index.suffix_array import build_suffix_array
from .source import DatasetDocuments, Source, after, batches, checked
from .tokenizing import Document, TokenBatch, encode, load_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Batches that wait to be fetched, of each shard of a dataset that is being read.
_BATCHES_AHEAD = 8


class RayEngine:
    """Tokenises and sorts in Ray tasks.

    A streaming dataset is read in them too, shard by shard: only its tokens come here. Any other
    source is read here. If Ray is not running yet, it is started, and stopped at the end.

    Args:
        content (`str`): The tokenizer's tokenizer.json.
        dtype (`np.dtype`), separator (`int`), vocab_size (`int`): Of the datastore.
        num_proc (`int`, *optional*): Tasks at once. By default one for each core of the cluster.

    Raises:
        ImportError: If Ray is not installed.
    """

    def __init__(
        self,
        content: str,
        dtype: np.dtype,
        separator: int,
        vocab_size: int,
        num_proc: int | None,
    ) -> None:
        try:
            import ray
        except ImportError:
            raise ImportError(
                "engine='ray' needs Ray: pip install hf_refspec[ray]", name="ray"
            ) from None
        self._ray = ray
        self._content = content
        self._format = (dtype, separator)
        self._vocab_size = vocab_size
        self._num_proc = num_proc
        self._started = False

    def tokenize(self, source: Source, skip: int) -> Iterator[TokenBatch]:
        """Tokenises the documents of a source but the first `skip`, in order."""
        self._start()
        # In a list a reference is handed over as it is, and looked up only by who needs it.
        content = [self._ray.put(self._content)]
        width = self._num_proc or max(1, int(self._ray.cluster_resources().get("CPU", 1)))
        shards = source.dataset.shards() if source.dataset is not None else []
        if shards:
            return _skipped(self._tokenize_shards(shards, content, width), skip)
        return self._tokenize_batches(batches(after(source.documents, skip)), content, width)

    def sort(self, tokens: np.ndarray) -> np.ndarray:
        """Makes the suffix array of a shard."""
        # It asks for no core: all can be taken by tasks that wait for this shard to be sorted.
        task = self._ray.remote(num_cpus=0)(build_suffix_array)
        return self._ray.get(task.remote(tokens))

    def close(self) -> None:
        """Stops Ray, if it was started here."""
        if self._started:
            self._ray.shutdown()
            self._started = False

    def _start(self) -> None:
        if not self._ray.is_initialized():
            self._ray.init(include_dashboard=False)
            self._started = True

    def _tokenize_batches(
        self, work: Iterator[list[Document]], content: list[Any], width: int
    ) -> Iterator[TokenBatch]:
        task = self._ray.remote(_encode_batch)
        in_flight: deque[Any] = deque()
        try:
            for batch in work:
                in_flight.append(task.remote(content, batch, *self._format))
                if len(in_flight) > 2 * width:
                    yield self._ray.get(in_flight.popleft())
            while in_flight:
                yield self._ray.get(in_flight.popleft())
        finally:
            for result in in_flight:
                self._ray.cancel(result)

    def _tokenize_shards(
        self, shards: list[DatasetDocuments], content: list[Any], width: int
    ) -> Iterator[TokenBatch]:
        task = self._ray.remote(
            num_returns="streaming", _generator_backpressure_num_objects=_BATCHES_AHEAD
        )(_encode_shard)
        waiting = iter(shards)
        in_flight: deque[Any] = deque()
        try:
            while True:
                for shard in islice(waiting, width - len(in_flight)):
                    in_flight.append(task.remote(content, shard, *self._format, self._vocab_size))
                if not in_flight:
                    return
                for result in in_flight[0]:
                    yield self._ray.get(result)
                in_flight.popleft()
        finally:
            for results in in_flight:
                self._ray.cancel(results)


def _encode_batch(
    content: list[Any], batch: list[Document], dtype: np.dtype, separator: int
) -> TokenBatch:
    return encode(_tokenizer(content[0]), batch, dtype, separator)


def _encode_shard(
    content: list[Any], shard: DatasetDocuments, dtype: np.dtype, separator: int, vocab_size: int
) -> Iterator[TokenBatch]:
    tokenizer = _tokenizer(content[0])
    for batch in batches(checked(shard, vocab_size)):
        yield encode(tokenizer, batch, dtype, separator)


@lru_cache(maxsize=1)
def _tokenizer(content: Any) -> Tokenizer:
    """The tokenizer, made once in a process of Ray."""
    import ray

    return load_tokenizer(ray.get(content))


def _skipped(token_batches: Iterator[TokenBatch], skip: int) -> Iterator[TokenBatch]:
    """Drops the first documents of a stream of tokens."""
    for lengths, tokens in token_batches:
        dropped = min(skip, len(lengths))
        skip -= dropped
        if dropped < len(lengths):
            yield lengths[dropped:], tokens[lengths[:dropped].sum() :]
    if skip:
        raise ValueError("source has fewer documents than before; start again without resume")
