"""Tokenises and sorts on a Ray cluster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from ...extras import require
from ...index.suffix_array import build_suffix_array
from ..datastore_config import StoreConfig
from ..tokenizer_file import load_backend
from .engine import in_order
from .source import batches
from .tokenizing import Document, TokenBatch, encode

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class RayEngine:
    """Tokenises and sorts in Ray tasks; starts Ray if it is not running yet, and then stops it at
    the end."""

    def __init__(self, content: str, config: StoreConfig, num_proc: int | None) -> None:
        self._ray = require("ray", "engine='ray'", "ray")
        self._setup = (content, config)
        self._num_proc = num_proc
        self._started = False

    def tokenize(self, documents: Iterator[Document]) -> Iterator[TokenBatch]:
        """See [`LocalEngine.tokenize`]."""
        ray = self._ray
        if not ray.is_initialized():
            ray.init(include_dashboard=False)
            self._started = True
        width = self._num_proc or max(1, int(ray.cluster_resources().get("CPU", 1)))
        # Ray passes a reference inside a list on as it is: each worker fetches it once.
        setup = [ray.put(self._setup)]
        task = ray.remote(_encode_batch)
        begun = in_order(
            batches(documents), lambda each: task.remote(each, setup), 2 * width, ray.cancel
        )
        with closing(begun):
            yield from map(ray.get, begun)

    def sort(self, tokens: np.ndarray) -> np.ndarray:
        """See [`LocalEngine.sort`]."""
        # It reserves no core: all can be taken by tasks that wait for this shard to be sorted.
        task = self._ray.remote(num_cpus=0)(build_suffix_array)
        return self._ray.get(task.remote(tokens))

    def close(self) -> None:
        """Stops Ray if this engine started it."""
        if self._started:
            self._ray.shutdown()
            self._started = False


def _encode_batch(batch: list[Document], setup: list[Any]) -> TokenBatch:
    tokenizer, config = _fetched(setup[0])
    return encode(tokenizer, batch, config.token_dtype, config.separator)


@lru_cache(maxsize=1)
def _fetched(reference: Any) -> tuple[Tokenizer, StoreConfig]:
    """The tokenizer, loaded once in each process of Ray, and the datastore's config."""
    import ray

    content, config = ray.get(reference)
    return load_backend(content), config
