"""A recycling table in a folder or on the Hub: a model's best next tokens after many contexts.

table.safetensors  contexts  uint16 or uint32, the tokens of each context, the last one first
                   tokens    uint16 or uint32, the best next tokens of each, best first
                   probs     float16, their probabilities
                   counts    float32, how often each token was the best next one

Rows are ordered from the oldest to the newest. The size of the vocabulary marks a missing token.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from ..index.recycling import MOST_CONTEXT, MOST_NEXT, NextTokens, TableContent
from ..version import __version__
from .files import FileEntry, new_folder, read_arrays, write_arrays
from .folder_config import FolderConfig, token_dtype
from .stored_folder import StoredFolder

TABLE = re.compile(r"table\.safetensors")


@dataclass(frozen=True)
class RecyclingTableConfig(FolderConfig):
    """The config.json of a recycling table, with `contexts` contexts of up to `context` tokens."""

    NOUN = "recycling table"
    FILES = (TABLE,)

    model: str
    vocab_size: Annotated[int, range(1, 2**31 - 1)]
    context: Annotated[int, range(1, MOST_CONTEXT + 1)]
    top_k: Annotated[int, range(1, MOST_NEXT + 1)]
    contexts: Annotated[int, range(1, 2**31)]
    table_file: Annotated[FileEntry, TABLE]
    source: dict[str, Any] = field(default_factory=dict)


class RecyclingTable(StoredFolder[RecyclingTableConfig]):
    """A stored table for [`TokenRecycling`] to start with."""

    config_type = RecyclingTableConfig

    def __init__(self, path: str | os.PathLike, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(path, tokenizer)
        self.check_tokenizer(tokenizer)

    @classmethod
    def write(
        cls,
        path: str | os.PathLike,
        table: NextTokens,
        tokenizer: PreTrainedTokenizerBase,
        model: str,
        source: dict[str, Any],
    ) -> RecyclingTable:
        """Writes a table with the public name of its model into a new folder."""
        entries = table.entries()
        vocab_size = entries.vocab_size
        assert vocab_size is not None  # something is learned

        def stored(tokens: np.ndarray) -> np.ndarray:
            return np.where(tokens < 0, vocab_size, tokens).astype(token_dtype(vocab_size))

        with new_folder(path) as folder:
            counts = np.zeros(vocab_size, dtype=np.float32)
            counts[: len(entries.counts)] = entries.counts[:vocab_size]
            arrays = {
                "counts": counts,
                "contexts": stored(entries.contexts),
                "tokens": stored(entries.tokens),
                "probs": entries.probs.astype(np.float16),
            }
            RecyclingTableConfig.made_for(
                tokenizer,
                model=model,
                vocab_size=vocab_size,
                context=table.context,
                top_k=table.top_k,
                contexts=len(entries),
                table_file=write_arrays(folder / "table.safetensors", arrays),
                source=source | {"hf_refspec": __version__},
            ).write(folder)
        return cls(path, tokenizer)

    def table(self, max_contexts: int) -> NextTokens:
        """A table with the newest entries; raises a DatastoreError if a value is wrong."""
        config = self.config
        rows = config.contexts
        ids = token_dtype(config.vocab_size)
        expected = {
            "contexts": (ids, (rows, MOST_CONTEXT)),
            "tokens": (ids, (rows, config.top_k)),
            "probs": (np.float16, (rows, config.top_k)),
            "counts": (np.float32, config.vocab_size),
        }
        arrays = read_arrays(self.path, config.table_file, expected)
        first = max(rows - max_contexts, 0)
        contexts = self._ids("contexts", arrays["contexts"][first:])
        tokens = self._ids("tokens", arrays["tokens"][first:])
        probs = arrays["probs"][first:].astype(np.float32)
        self._check(((probs >= 0) & (probs <= 1)).all(), "a probability is not from 0 to 1")
        held = contexts >= 0
        whole = held[:, 0] & (held[:, 1] | ~held[:, 2]) & ~held[:, config.context :].any(axis=1)
        self._check(whole.all(), f"a context is not one of 1 to {config.context} tokens")
        counts = arrays["counts"].copy()
        sound = (counts >= 0) & np.isfinite(counts)
        self._check(sound.all(), "a count is not a number from 0 on")
        # Memory is allocated once all of this is checked.
        content = TableContent(contexts, tokens, probs, counts, config.vocab_size)
        return NextTokens(config.top_k, config.context, max_contexts, content)

    def _ids(self, name: str, stored: np.ndarray) -> np.ndarray:
        """Stored tokens as int32 of the same shape, -1 for none."""
        largest = stored.max()
        size = self.config.vocab_size
        self._check(
            largest <= size, f"{name} has the token {largest}, but the ids are below {size}"
        )
        ids = stored.astype(np.int32)
        ids[ids == size] = -1
        return ids

    def _check(self, sound: np.bool_, reason: str) -> None:
        if not sound:  # no comparison with NaN is true
            raise self._damaged(self.config.table_file, reason)
