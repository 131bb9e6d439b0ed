"""A knowledge base made larger by passages that are about nothing, for the cost of searches."""

from __future__ import annotations

import os

import numpy as np
from transformers import PreTrainedTokenizerBase

from ..store.knowledge_base import KnowledgeBase

_ROWS_AT_ONCE = 1 << 16


class PaddedKnowledgeBase(KnowledgeBase):
    """A knowledge base with distractors after its passages, in memory.

    Their embeddings are random directions. In hundreds of dimensions all of them are at nearly
    right angles to any query: they are looked at, and are not what is found.

    Args:
        path (`str` or `Path`): The folder of the knowledge base.
        tokenizer (`PreTrainedTokenizerBase`): The language model's.
        distractors (`int`): How many.

    Raises:
        ValueError: If it has no embeddings.
    """

    def __init__(
        self, path: str | os.PathLike, tokenizer: PreTrainedTokenizerBase, distractors: int
    ) -> None:
        super().__init__(path, tokenizer)
        if self.embeddings is None:
            raise ValueError(f"{path} has no embeddings, so that there is nothing to pad")
        self._distractors = distractors
        self.embeddings = _padded(self.embeddings, distractors)

    def __len__(self) -> int:
        return self.config.passages + self._distractors

    def passage(self, passage_id: int) -> np.ndarray:
        """The tokens of a passage; a distractor has those of the first passage's beginning."""
        if self.config.passages <= passage_id < len(self):
            return super().passage(0)[:4]
        return super().passage(passage_id)


def _padded(embeddings: np.ndarray, distractors: int) -> np.ndarray:
    """The embeddings, and as many random ones of length 1."""
    rng = np.random.default_rng(0)
    padded = np.empty((len(embeddings) + distractors, embeddings.shape[1]), dtype=np.float32)
    padded[: len(embeddings)] = embeddings
    for begin in range(len(embeddings), len(padded), _ROWS_AT_ONCE):
        rows = padded[begin : begin + _ROWS_AT_ONCE]
        rng.standard_normal(dtype=np.float32, out=rows)
        rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    return padded
