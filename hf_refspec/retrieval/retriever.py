"""The protocol of retrievers, and what a search finds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

# From this many times k on, the k best are parted from the rest before they are sorted.
_WORTH_PARTING = 4


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
        if len(scores) > _WORTH_PARTING * k:
            # All that score as the k-th does stay: ids decide which of them are taken.
            among_best = scores >= np.partition(scores, -k)[-k]
            ids, scores = ids[among_best], scores[among_best]
        order = np.lexsort((ids, -scores))[:k]
        return cls(ids[order], scores[order])

    def first(self, k: int) -> Retrieved:
        """The `k` best of these."""
        return Retrieved(self.ids[:k], self.scores[:k])

    def __len__(self) -> int:
        return len(self.ids)


@runtime_checkable
class Retriever(Protocol):
    """Finds passages: any object with these methods.

    A query is what `encode` returns. It must find the same passages with the same scores whatever
    else is in the batch: the request cache predicts by `score` what `search` would find (RaLMSpec,
    arXiv 2401.14021, section 3).

    What speculation learns of a retriever, the time of its searches and how often guesses are
    right, is kept in its `__dict__` for the next call; without one, each call starts afresh.
    """

    def encode(self, token_ids: np.ndarray) -> Any:
        """Returns a query for the last tokens of a text (int64 of shape `(n,)`)."""

    def search(self, queries: Sequence[Any], k: int) -> list[Retrieved]:
        """The `k` best passages for each query, fewer where there are no more.

        It is called from another thread than `encode` and `score`, concurrently.
        """

    def score(self, query: Any, ids: np.ndarray) -> np.ndarray:
        """The scores (float32 of shape `(n,)`) that the passages `ids` have in `search`."""

    def passage(self, passage_id: int) -> np.ndarray:
        """The tokens (int64) of a passage."""
