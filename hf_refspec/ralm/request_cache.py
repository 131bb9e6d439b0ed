"""The request cache: what speculation retrieves from (RaLMSpec, arXiv 2401.14021, section 3)."""

from __future__ import annotations

import numpy as np

from ..retrieval.retrieved import Retrieved
from .checked_search import CheckedRetriever

# From this many times k on, the k best are parted from the rest before they are sorted.
_WORTH_PARTING = 4
# Scoring more would take longer than the search that it saves.
MOST_HELD = 1 << 14


class RequestCache:
    """The ids that were retrieved for one request, ranked by the retriever's own metric.

    Args:
        retriever ([`CheckedRetriever`]): Where they come from.
        most (`int`, *optional*, defaults to 16384): How many are held: those retrieved last.

    Attributes:
        ids (`np.ndarray`, int64 of shape `(n,)`): Ascending.
    """

    def __init__(self, retriever: CheckedRetriever, most: int = MOST_HELD) -> None:
        self._retriever = retriever
        self._most = most
        self.ids = np.empty(0, dtype=np.int64)
        self._last_added = np.empty(0, dtype=np.int64)  # in which addition
        self._additions = 0

    def add(self, ids: np.ndarray) -> None:
        """Takes in what was retrieved (int64 of shape `(m,)`, also several times)."""
        self._additions += 1
        ids = np.unique(ids)
        places = np.searchsorted(self.ids, ids)
        held = places < len(self.ids)
        held[held] = self.ids[places[held]] == ids[held]
        self._last_added[places[held]] = self._additions
        self.ids = np.insert(self.ids, places[~held], ids[~held])
        self._last_added = np.insert(self._last_added, places[~held], self._additions)
        if len(self.ids) > self._most:
            kept = np.sort(np.argsort(-self._last_added, kind="stable")[: self._most])
            self.ids, self._last_added = self.ids[kept], self._last_added[kept]

    def best(self, query: object, k: int) -> Retrieved:
        """The `k` best for a query, or all where there are fewer."""
        return best_of(self._retriever, query, self.ids, k)


def best_of(retriever: CheckedRetriever, query: object, ids: np.ndarray, k: int) -> Retrieved:
    """The `k` best of some passages for a query, by the retriever's own scores.

    Args:
        retriever ([`CheckedRetriever`]): Scores them.
        query: What is searched for.
        ids (`np.ndarray`, int64 of shape `(n,)`): The passages.
        k (`int`): How many, or all where there are fewer.
    """
    scores = retriever.score(query, ids)
    if len(scores) > _WORTH_PARTING * k:
        # All that score as the k-th does stay: which of them is taken is decided by their ids.
        among_best = scores >= np.partition(scores, -k)[-k]
        return Retrieved.best(ids[among_best], scores[among_best], k)
    return Retrieved.best(ids, scores, k)
