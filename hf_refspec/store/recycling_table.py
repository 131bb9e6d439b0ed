"""A recycling table: what a model expected after many contexts, in a folder or on the Hub.

table.safetensors  contexts  uint16 or uint32, the tokens of each context, the last one first
                   tokens    uint16 or uint32, the best next tokens of each, best first
                   probs     float16, their probabilities
                   counts    float32, how often each token was the best next one

Rows stand from the oldest to the newest. Where there is no token stands the size of the vocabulary.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from transformers import PreTrainedTokenizerBase

from ..index.next_tokens import Entries
from ..index.recycling import MOST_CONTEXT
from ..version import __version__
from .files import DatastoreError, FileEntry, read_arrays, write_arrays
from .fingerprint import public_name, tokenizer_fingerprint
from .folder import FolderConfig, new_folder, token_dtype
from .schema import Named, Range
from .stored_folder import StoredFolder

TABLE = Named("a recycling table", r"table\.safetensors")
# Next tokens of a context. A drafter that goes on learning has room for so many of each of its
# contexts, however few there are in the file.
MOST_NEXT = 256


@dataclass(frozen=True)
class RecyclingTableConfig(FolderConfig):
    """What the config.json of a recycling table says.

    Attributes:
        model (`str`): The model whose expectations they are, for people.
        vocab_size (`int`): The model's; all token ids are below it.
        context (`int`): The longest contexts.
        top_k (`int`): How many next tokens each has.
        contexts (`int`): How many.
        table_file (`FileEntry`): Where they are.
        source (`dict`): What it was learned from, for people and for the card.
    """

    NOUN = "recycling table"
    HEADER: ClassVar[dict[str, Any]] = {"kind": NOUN, "format_version": 1}
    FILES = (TABLE,)
    TEMPLATE = "recycling_table.md"

    model: str
    vocab_size: Annotated[int, Range(1, 2**31 - 2)]
    context: Annotated[int, Range(1, MOST_CONTEXT)]
    top_k: Annotated[int, Range(1, MOST_NEXT)]
    contexts: Annotated[int, Range(1, 2**31 - 1)]
    table_file: Annotated[FileEntry, TABLE]
    source: dict[str, Any] = field(default_factory=dict)


class RecyclingTable(StoredFolder[RecyclingTableConfig]):
    """A stored table, which [`TokenRecycling`] begins with.

    Args:
        path (`str` or `Path`): The folder. See [`~RecyclingTable.from_pretrained`] for one on the
            Hub.
        tokenizer (`PreTrainedTokenizerBase`): The target model's.

    Raises:
        DatastoreError: If there is no table, it is damaged, or it was made for another tokenizer.
    """

    config_type = RecyclingTableConfig

    def __init__(self, path: str | os.PathLike, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(path)
        self.check_tokenizer(tokenizer)

    def _open(self, config: RecyclingTableConfig) -> None:
        self.config = config

    def __repr__(self) -> str:
        config = self.config
        held = f"contexts={config.contexts:,}, context={config.context}, top_k={config.top_k}"
        return f"RecyclingTable({str(self.path)!r}, {held}, model={config.model!r})"

    @classmethod
    def write(
        cls,
        path: str | os.PathLike,
        entries: Entries,
        tokenizer: PreTrainedTokenizerBase,
        *,
        model: str,
        vocab_size: int,
        context: int,
        source: dict[str, Any],
    ) -> RecyclingTable:
        """Writes a table into a new folder, all of it or nothing, and opens it.

        Raises:
            FileExistsError: If there is something at `path`.
            OSError: If it cannot be written.
        """
        dtype = token_dtype(vocab_size)
        contexts, tokens = (
            np.where(ids < 0, vocab_size, ids).astype(dtype).ravel()
            for ids in (entries.contexts, entries.tokens)
        )
        counts = np.zeros(vocab_size, dtype=np.float32)
        counts[: len(entries.counts)] = entries.counts[:vocab_size]
        arrays = {
            "counts": counts,
            "contexts": contexts,
            "tokens": tokens,
            "probs": entries.probs.astype(np.float16).ravel(),
        }
        with new_folder(Path(path)) as folder:
            RecyclingTableConfig(
                fingerprint=tokenizer_fingerprint(tokenizer),
                tokenizer=public_name(tokenizer),
                model=model,
                vocab_size=vocab_size,
                context=context,
                top_k=entries.tokens.shape[1],
                contexts=len(entries.contexts),
                table_file=write_arrays(folder / "table.safetensors", arrays),
                source=source | {"hf_refspec": __version__},
            ).write(folder)
        return cls(path, tokenizer)

    def entries(self, most: int | None = None) -> Entries:
        """All entries, or the newest ones, read and checked.

        Args:
            most (`int`, *optional*): How many at most.

        Raises:
            DatastoreError: If a token is outside of the vocabulary, a context is none, or a
                probability is no number from 0 to 1.
        """
        config = self.config
        ids = token_dtype(config.vocab_size)
        lengths = {"contexts": MOST_CONTEXT, "tokens": config.top_k, "probs": config.top_k}
        expected = {
            name: (np.dtype(np.float16) if name == "probs" else ids, config.contexts * length)
            for name, length in lengths.items()
        }
        expected["counts"] = (np.dtype(np.float32), config.vocab_size)
        with self._reading():
            arrays = read_arrays(self.path, config.table_file, expected)
            first = 0 if most is None else max(config.contexts - most, 0)
            newest = {name: arrays[name].reshape(config.contexts, -1)[first:] for name in lengths}
            contexts, tokens = (self._ids(name, newest[name]) for name in ("contexts", "tokens"))
            probs = newest["probs"].astype(np.float32)
            if not ((probs >= 0) & (probs <= 1)).all():  # NaN neither
                raise self._damaged("a probability is no number from 0 to 1")
            held = contexts >= 0
            whole = held[:, 0] & (held[:, 1] | ~held[:, 2]) & ~held[:, config.context :].any(axis=1)
            if not whole.all():
                raise self._damaged(f"a context is not one of 1 to {config.context} tokens")
            counts = arrays["counts"].copy()
            if not ((counts >= 0) & np.isfinite(counts)).all():
                raise self._damaged("a count is no number from 0 on")
            return Entries(contexts, tokens, probs, counts)

    def _ids(self, name: str, stored: np.ndarray) -> np.ndarray:
        """Stored tokens as int32, -1 for none."""
        if stored.max() > self.config.vocab_size:
            raise self._damaged(
                f"{name} has the token {stored.max()}, but the ids are below "
                f"{self.config.vocab_size}"
            )
        ids = stored.astype(np.int32)
        ids[ids == self.config.vocab_size] = -1
        return ids

    def _damaged(self, reason: str) -> DatastoreError:
        return DatastoreError(f"{self.path / self.config.table_file.name} is damaged: {reason}")
