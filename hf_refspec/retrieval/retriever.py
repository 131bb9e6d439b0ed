"""The protocol of retrievers, and the result of a search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

# With more than this many candidates for each of the k best, the rest are dropped before sorting.
_WORTH_PARTING = 4


@dataclass(frozen=True, slots=True, eq=False)
class Retrieved:
    """The result of a query, best first, and the lower id first where scores are equal.

    Attributes:
        ids (`np.ndarray`, int64 of shape `(k,)`): Passages or entries, each at most once.
        scores (`np.ndarray`, float32 of shape `(k,)`): Higher is better.
    """

    ids: np.ndarray
    scores: np.ndarray

    @classmethod
    def best(cls, ids: np.ndarray, scores: np.ndarray, k: int) -> Retrieved:
        """The `k` best of `ids` (int64, `(n,)`) by `scores` (float32, `(n,)`), in order."""
        if len(scores) > _WORTH_PARTING * k:
            # All with the score of the k-th stay: their ids decide which of them are taken.
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

    A query, which `encode` returns, must find the same passages with the same scores whatever else
    is in the batch: the request cache uses `score` to predict what `search` would find (RaLMSpec,
    arXiv 2401.14021, section 3). A call keeps its measurements and the ids retrieved last in the
    retriever's `__dict__`, if it has one, for the next call.

    Two attributes are optional. `search_threads` (`int`) is how many threads of this machine a
    search keeps busy: where no core is left, the model waits for it. `concurrent_searches` (`int`)
    is in how many threads `search` may run at once, as for the client of a database elsewhere."""

    def encode(self, token_ids: np.ndarray) -> Any:
        """Returns a query for the last tokens of a text (int64 of shape `(n,)`)."""

    def search(self, queries: Sequence[Any], k: int) -> list[Retrieved]:
        """The `k` best passages for each query, or all if there are fewer.

        It runs in another thread, while `encode` and `score` are called."""

    def score(self, query: Any, ids: np.ndarray) -> np.ndarray:
        """The scores (float32, `(n,)`) that the passages `ids` (int64, `(n,)`) have in `search`."""

    def passage(self, passage_id: int) -> np.ndarray:
        """The tokens (int64) of a passage."""
