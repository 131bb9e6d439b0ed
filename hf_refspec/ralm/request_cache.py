"""The request cache: what speculation retrieves from (RaLMSpec, arXiv 2401.14021, section 3)."""

from __future__ import annotations

import numpy as np

from ..retrieval.retrieved import Retrieved
from .checked_search import CheckedRetriever

# Scoring more would take longer than the search that it saves.
MOST_HELD = 1 << 14


class RequestCache:
    """The ids (int64, ascending) that one request retrieved: the latest, at most `most`."""

    def __init__(self, retriever: CheckedRetriever, most: int = MOST_HELD) -> None:
        self._retriever = retriever
        self._most = most
        self.ids = np.empty(0, dtype=np.int64)
        self._last_added = np.empty(0, dtype=np.int64)  # the number of the addition
        self._additions = 0

    def add(self, ids: np.ndarray) -> None:
        """Adds retrieved ids (int64 of shape `(m,)`, with repetitions)."""
        self._additions += 1
        added = np.unique(ids)
        kept = ~np.isin(self.ids, added, assume_unique=True)
        last_added = np.full(len(added), self._additions, np.int64)
        self.ids = np.concatenate([self.ids[kept], added])
        self._last_added = np.concatenate([self._last_added[kept], last_added])
        if len(self.ids) > self._most:
            self._take(np.lexsort((self.ids, -self._last_added))[: self._most])
        self._take(np.argsort(self.ids))

    def _take(self, places: np.ndarray) -> None:
        self.ids, self._last_added = self.ids[places], self._last_added[places]

    def best(self, query: object, k: int) -> Retrieved:
        """The `k` best for a query, or all where there are fewer."""
        return best_of(self._retriever, query, self.ids, k)


def best_of(retriever: CheckedRetriever, query: object, ids: np.ndarray, k: int) -> Retrieved:
    """The `k` best of the passages `ids` for a query, by the retriever's own scores."""
    return Retrieved.best(ids, retriever.score(query, ids), k)
