"""Packs documents into shards, and shows how far that is.

One shard is filled while the one before is sorted and written; no more are ever in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
from tqdm.auto import tqdm

from ..datastore_config import ShardEntry, StoreConfig
from ..files import write_arrays
from ..folder import sync_folder
from .progress import BuildProgress


class ShardWriter:
    """Packs documents into shards, each sorted and written in the background.

    Args:
        folder (`Path`): Where to.
        config (`StoreConfig`): The types, and the shards that there are.
        shard_tokens (`int`): Entries of a shard.
        sort (`Callable`): Makes the suffix array of a shard's tokens.
        progress (`BuildProgress`): Brought up to date with each shard.
        bars (`ProgressBars`): Likewise.
    """

    def __init__(
        self,
        folder: Path,
        config: StoreConfig,
        shard_tokens: int,
        sort: Callable[[np.ndarray], np.ndarray],
        progress: BuildProgress,
        bars: ProgressBars,
    ) -> None:
        self.folder = folder
        self.dtype = config.token_dtype
        self.shard_tokens = shard_tokens
        self.sort = sort
        self.progress = progress
        self.bars = bars
        self._taken = {file.name for file in config.files()}
        self._number = len(config.shards) + len(progress.shards)
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
        self._writing = self._background.submit(self._write, tokens, self._ended, self._done)
        self._begin()

    def _wait(self) -> None:
        if self._writing is not None:
            self._writing.result()
            self._writing = None

    def _write(self, tokens: np.ndarray, documents: int, done: tuple[int, int]) -> None:
        suffixes = self.sort(tokens)
        self.bars["sorted"].update()
        self._number += 1
        while f"tokens-{self._number:05d}.safetensors" in self._taken:
            self._number += 1
        files = [
            write_arrays(self.folder / f"{name}-{self._number:05d}.safetensors", {name: array})
            for name, array in (("tokens", tokens), ("suffixes", suffixes))
        ]
        self.progress.shards.append(ShardEntry(len(tokens), documents, *files))
        self.progress.documents, self.progress.entries = done
        sync_folder(self.folder)
        self.progress.write(self.folder)
        self.bars["written"].update()


class ProgressBars(dict[str, tqdm]):
    """Shows how much is read, tokenised, sorted and written.

    Args:
        show (`bool`): Without it there are no bars to be seen.
        total (`int`, *optional*): The documents of the source, if their number is known.
        progress (`BuildProgress`): Where the bars begin.
    """

    def __init__(self, show: bool, total: int | None, progress: BuildProgress) -> None:
        shards = len(progress.shards)
        tokens = sum(shard.tokens for shard in progress.shards)
        for name, does, unit, initial in (
            ("documents", "reading", " documents", progress.documents),
            ("tokens", "tokenising", " tokens", tokens),
            ("sorted", "sorting", " shards", shards),
            ("written", "writing", " shards", shards),
        ):
            self[name] = tqdm(
                desc=does,
                unit=unit,
                initial=initial,
                total=total if name == "documents" else None,
                unit_scale=name == "tokens",
                disable=not show,
            )

    def close(self) -> None:
        """Leaves the bars as they are."""
        for bar in self.values():
            bar.close()
