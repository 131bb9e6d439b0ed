"""Packs documents into shards.

One shard is filled while the one before is sorted and written; no more are ever in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from ..datastore_config import ShardEntry, StoreConfig
from ..files import write_arrays
from ..folder import sync_folder
from .display import BuildDisplay
from .merge import next_number
from .progress import BuildProgress


class ShardWriter:
    """Packs documents into shards, each sorted and written in the background.

    Args:
        folder (`Path`): The folder that they are written into.
        config (`StoreConfig`): The token type, and the shards that exist already.
        shard_tokens (`int`): Entries of a shard.
        sort (`Callable`): Returns the suffix array of a shard's tokens.
        progress ([`BuildProgress`]), display ([`BuildDisplay`]): Updated with each shard.
    """

    def __init__(
        self,
        folder: Path,
        config: StoreConfig,
        shard_tokens: int,
        sort: Callable[[np.ndarray], np.ndarray],
        progress: BuildProgress,
        display: BuildDisplay,
    ) -> None:
        self.folder, self.dtype, self.shard_tokens = folder, config.token_dtype, shard_tokens
        self.sort, self.progress, self.display = sort, progress, display
        self._number = next_number(folder)
        self._flushed = len(progress.shards)
        self._done = (progress.documents, progress.entries)
        self._background = ThreadPoolExecutor(1)
        self._writing: Future[None] | None = None
        self._begin()

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        try:
            if kind is None:
                if self._filled:
                    self._flush()
                self.display.has_read_all(self._flushed)
                self._wait()
        finally:
            self._background.shutdown()

    def add(self, document: np.ndarray, start: int, number: int) -> None:
        """Adds a document from `start` on; `number` documents are done with after it."""
        while start < len(document):
            part = document[start : start + self.shard_tokens - self._filled]
            self._tokens[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            start += len(part)
            whole = start == len(document)
            self._ended += whole
            self._done = (number, 0) if whole else (number - 1, start)
            if self._filled == self.shard_tokens:
                self._flush()

    def _begin(self) -> None:
        self._tokens = np.empty(self.shard_tokens, self.dtype)
        self._filled = self._ended = 0

    def _flush(self) -> None:
        self._wait()
        tokens = self._tokens[: self._filled]
        self._flushed += 1
        self._writing = self._background.submit(self._write, tokens, self._ended, self._done)
        self._begin()

    def _wait(self) -> None:
        if self._writing is not None:
            self._writing.result()
            self._writing = None

    def _write(self, tokens: np.ndarray, documents: int, done: tuple[int, int]) -> None:
        suffixes = self.sort(tokens)
        self.display.has_sorted()
        files = [
            write_arrays(self.folder / f"{name}-{self._number:05d}.safetensors", {name: array})
            for name, array in (("tokens", tokens), ("suffixes", suffixes))
        ]
        self._number += 1
        self.progress.shards.append(ShardEntry(len(tokens), documents, *files))
        self.progress.documents, self.progress.entries = done
        sync_folder(self.folder)
        self.progress.write(self.folder)
        self.display.has_written()
