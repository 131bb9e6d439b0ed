"""What a retriever is: the protocol that speculation relies on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class Retrieved:
    """What a query has found, best first; of two with the same score the lower id stands first.

    Attributes:
        ids (`np.ndarray`, int64 of shape `(k,)`): Of passages (or datastore entries), no one twice.
        scores (`np.ndarray`, float32 of shape `(k,)`): Higher is better.
    """

    ids: np.ndarray
    scores: np.ndarray

    @classmethod
    def best(cls, ids: np.ndarray, scores: np.ndarray, k: int) -> Retrieved:
        """The `k` best of some, in order: by score, and by id where scores are equal."""
        order = np.lexsort((ids, -scores))[:k]
        return cls(ids[order], scores[order])

    def __len__(self) -> int:
        return len(self.ids)


@runtime_checkable
class Retriever(Protocol):
    """Finds passages. Anything that has these methods will do.

    A query is whatever `encode` returns and `search` and `score` take. The same query must find the
    same passages with the same scores whatever is asked beside it: the request cache decides by
    `score` what `search` would have found.
    """

    def encode(self, token_ids: np.ndarray) -> Any:
        """Makes a query of the last tokens of a text (int64 of shape `(n,)`)."""

    def search(self, queries: Sequence[Any], k: int) -> list[Retrieved]:
        """The `k` best passages for each query, fewer where there are no more.

        It is called from another thread than `encode` and `score`, and at the same time.
        """

    def score(self, query: Any, ids: np.ndarray) -> np.ndarray:
        """The scores (float32 of shape `(n,)`) that `search` gives to the passages `ids`."""

    def passage(self, passage_id: int) -> np.ndarray:
        """The tokens (int64) of a passage."""
