"""The request cache: what speculation retrieves from (RaLMSpec, arXiv 2401.14021, section 3)."""

from __future__ import annotations

import numpy as np

from ..retrieval.retrieved import Retrieved
from .checked_search import CheckedRetriever

# Scoring more would take longer than the search that it saves.
MOST_HELD = 1 << 14


class RequestCache:
    """The ids (int64, ascending) that one request retrieved: the latest, at most `most` or as many
    as were added last."""

    def __init__(self, retriever: CheckedRetriever, most: int = MOST_HELD) -> None:
        self._retriever = retriever
        self._most = most
        self.ids = self._newest_first = np.empty(0, dtype=np.int64)

    def add(self, ids: np.ndarray) -> None:
        """Adds retrieved ids (int64 of shape `(m,)`, with repetitions)."""
        added = np.unique(ids)
        older = self._newest_first[~np.isin(self._newest_first, added, assume_unique=True)]
        self._newest_first = np.concatenate([added, older])[: max(self._most, len(added))]
        self.ids = np.sort(self._newest_first)

    def best(self, query: object, k: int) -> Retrieved:
        """The `k` best for a query, or all where there are fewer."""
        return best_of(self._retriever, query, self.ids, k)


def best_of(retriever: CheckedRetriever, query: object, ids: np.ndarray, k: int) -> Retrieved:
    """The `k` best of the passages `ids` for a query, by the retriever's own scores."""
    return Retrieved.best(ids, retriever.score(query, ids), k)
