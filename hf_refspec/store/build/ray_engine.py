"""Tokenises and sorts on a Ray cluster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from ...index.suffix_array import build_suffix_array
from .engine import TokenFormat, in_order
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
        tokens (`TokenFormat`): What documents become.
        num_proc (`int`, *optional*): Tasks at once. By default one for each core of the cluster.

    Raises:
        ImportError: If Ray is not installed.
    """

    def __init__(self, tokens: TokenFormat, num_proc: int | None) -> None:
        try:
            import ray
        except ImportError:
            raise ImportError(
                "engine='ray' needs Ray: pip install hf_refspec[ray]", name="ray"
            ) from None
        self._ray = ray
        self._tokens = tokens
        self._num_proc = num_proc
        self._started = False

    def tokenize(self, source: Source, skip: int) -> Iterator[TokenBatch]:
        """Tokenises the documents of a source but the first `skip`, in order."""
        self._start()
        width = self._num_proc or max(1, int(self._ray.cluster_resources().get("CPU", 1)))
        # In a list a reference is handed over as it is, and looked up only by who needs it.
        setup = ([self._ray.put(self._tokens.content)], self._tokens.dtype, self._tokens.separator)
        shards = source.dataset.shards() if source.dataset is not None else []
        if shards:
            return _skipped(self._tokenize_shards(shards, setup, width), skip)
        return self._tokenize_batches(batches(after(source.documents, skip)), setup, width)

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
        self, work: Iterator[list[Document]], setup: Any, width: int
    ) -> Iterator[TokenBatch]:
        task = self._ray.remote(_encode_batch)
        begun = in_order(
            work, lambda batch: task.remote(batch, *setup), 2 * width, self._ray.cancel
        )
        with closing(begun):
            yield from map(self._ray.get, begun)

    def _tokenize_shards(
        self, shards: list[DatasetDocuments], setup: Any, width: int
    ) -> Iterator[TokenBatch]:
        task = self._ray.remote(
            num_returns="streaming", _generator_backpressure_num_objects=_BATCHES_AHEAD
        )(_encode_shard)
        vocab_size = self._tokens.vocab_size
        begun = in_order(
            shards,
            lambda shard: task.remote(shard, *setup, vocab_size),
            width - 1,
            self._ray.cancel,
        )
        with closing(begun):
            for encoded in begun:
                yield from map(self._ray.get, encoded)


def _encode_batch(
    batch: list[Document], content: list[Any], dtype: np.dtype, separator: int
) -> TokenBatch:
    return encode(_tokenizer(content[0]), batch, dtype, separator)


def _encode_shard(
    shard: DatasetDocuments, content: list[Any], dtype: np.dtype, separator: int, vocab_size: int
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
