"""Tokenises and sorts on a Ray cluster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from ...index.suffix_array import build_suffix_array
from ..datastore_config import StoreConfig
from ..tokenizer_file import load_backend
from .read_ahead import in_order
from .source import DatasetDocuments, Source, after, batches, checked
from .tokenizing import Document, TokenBatch, encode

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Batches of each dataset shard that wait to be fetched.
_BATCHES_AHEAD = 8


class RayEngine:
    """Tokenises and sorts in Ray tasks.

    A streaming dataset is read in them too, shard by shard: only its tokens come here. Any other
    source is read here. If Ray is not running yet, it is started, and stopped at the end.

    Args:
        content, config: As of [`LocalEngine`].
        num_proc (`int`, *optional*): Tasks at once. By default one for each core of the cluster.

    Raises:
        ImportError: If Ray is not installed.
    """

    def __init__(self, content: str, config: StoreConfig, num_proc: int | None) -> None:
        try:
            import ray
        except ImportError:
            raise ImportError(
                "engine='ray' needs Ray: pip install hf_refspec[ray]", name="ray"
            ) from None
        self._ray = ray
        self._setup = (content, config)
        self._num_proc = num_proc
        self._started = False

    def tokenize(self, source: Source, skip: int) -> Iterator[TokenBatch]:
        """See [`LocalEngine.tokenize`]."""
        ray = self._ray
        if not ray.is_initialized():
            ray.init(include_dashboard=False)
            self._started = True
        width = self._num_proc or max(1, int(ray.cluster_resources().get("CPU", 1)))
        # A reference in a list is passed on as it is: each worker fetches it once.
        setup = [ray.put(self._setup)]
        shards = source.dataset.shards() if source.dataset is not None else []
        if shards:
            options = {"_generator_backpressure_num_objects": _BATCHES_AHEAD}
            read = ray.remote(num_returns="streaming", **options)(_encode_shard)
            streams = in_order(shards, lambda each: read.remote(each, setup), width - 1, ray.cancel)
            with closing(streams):
                yield from _skipped(map(ray.get, chain.from_iterable(streams)), skip)
        else:
            work = batches(after(source.documents, skip))
            task = ray.remote(_encode_batch)
            begun = in_order(work, lambda each: task.remote(each, setup), 2 * width, ray.cancel)
            with closing(begun):
                yield from map(ray.get, begun)

    def sort(self, tokens: np.ndarray) -> np.ndarray:
        """See [`LocalEngine.sort`]."""
        # It asks for no core: all can be taken by tasks that wait for this shard to be sorted.
        task = self._ray.remote(num_cpus=0)(build_suffix_array)
        return self._ray.get(task.remote(tokens))

    def close(self) -> None:
        """Stops Ray, if it was started here."""
        if self._started:
            self._ray.shutdown()
            self._started = False


def _encode_batch(batch: list[Document], setup: list[Any]) -> TokenBatch:
    tokenizer, config = _fetched(setup[0])
    return encode(tokenizer, batch, config.token_dtype, config.separator)


def _encode_shard(shard: DatasetDocuments, setup: list[Any]) -> Iterator[TokenBatch]:
    _, config = _fetched(setup[0])
    for batch in batches(checked(shard, config.vocab_size)):
        yield _encode_batch(batch, setup)


@lru_cache(maxsize=1)
def _fetched(reference: Any) -> tuple[Tokenizer, StoreConfig]:
    """The tokenizer, loaded once in a process of Ray, and the datastore's config."""
    import ray

    content, config = ray.get(reference)
    return load_backend(content), config


def _skipped(token_batches: Iterator[TokenBatch], skip: int) -> Iterator[TokenBatch]:
    """Drops the first documents of a stream of tokens."""
    for lengths, tokens in token_batches:
        dropped = min(skip, len(lengths))
        skip -= dropped
        if dropped < len(lengths):
            yield lengths[dropped:], tokens[lengths[:dropped].sum() :]
    if skip:
        raise ValueError("source has fewer documents than before; start again without resume")
