"""The request cache: what speculation retrieves from (RaLMSpec, section 3)."""

from __future__ import annotations

import numpy as np

from ..index.retrieved import Retrieved
from .checked_search import CheckedRetriever

# From this many times k on, the k best are parted from the rest before they are sorted.
_WORTH_PARTING = 4
# No more are held, so that scoring them all stays fast however long the text is.
MOST_HELD = 1 << 14


class RequestCache:
    """The ids that were retrieved for one request, ranked by the retriever's own metric.

    Of more than `MOST_HELD`, those that were retrieved last.

    Attributes:
        ids (`np.ndarray`, int64 of shape `(n,)`): Ascending.
        ranks (`np.ndarray`, int64 of shape `(n,)`): How high (from 0) each stood in the search that
            brought it.
    """

    def __init__(self, retriever: CheckedRetriever) -> None:
        self._retriever = retriever
        self.ids = np.empty(0, dtype=np.int64)
        self.ranks = np.empty(0, dtype=np.int64)
        self._last_added = np.empty(0, dtype=np.int64)  # in which addition
        self._additions = 0

    def __len__(self) -> int:
        return len(self.ids)

    def add(self, ids: np.ndarray, ranks: np.ndarray) -> None:
        """Takes in what it does not hold yet.

        Args:
            ids (`np.ndarray`, int64 of shape `(m,)`): Also several times; the first one counts.
            ranks (`np.ndarray`, int64 of shape `(m,)`): See the attribute.
        """
        self._additions += 1
        ids, first = np.unique(ids, return_index=True)
        held = self._holds(ids)
        self._last_added[np.searchsorted(self.ids, ids[held])] = self._additions
        new = ids[~held]
        places = np.searchsorted(self.ids, new)
        self.ids = np.insert(self.ids, places, new)
        self.ranks = np.insert(self.ranks, places, ranks[first][~held])
        self._last_added = np.insert(self._last_added, places, self._additions)
        if len(self) > MOST_HELD:
            self._keep(np.sort(np.argsort(-self._last_added, kind="stable")[:MOST_HELD]))

    def rank_of(self, passage_id: int) -> int | None:
        """The rank with which an id came in; `None` if it is not here."""
        ids = np.array([passage_id])
        if not self._holds(ids)[0]:
            return None
        return int(self.ranks[np.searchsorted(self.ids, passage_id)])

    def best(self, query: object, k: int, others: np.ndarray | None = None) -> Retrieved:
        """The `k` best for a query, or all where there are fewer.

        Args:
            query: What is searched for.
            k (`int`): How many.
            others (`np.ndarray`, int64, *optional*): Ids to choose from as well.
        """
        ids = self.ids if others is None else np.union1d(self.ids, others)
        scores = self._retriever.score(query, ids)
        if len(scores) > _WORTH_PARTING * k:
            # All that score as the k-th does stay: which of them is taken is decided by their ids.
            among_best = scores >= np.partition(scores, -k)[-k]
            return Retrieved.best(ids[among_best], scores[among_best], k)
        return Retrieved.best(ids, scores, k)

    def _keep(self, places: np.ndarray) -> None:
        self.ids, self.ranks = self.ids[places], self.ranks[places]
        self._last_added = self._last_added[places]

    def _holds(self, ids: np.ndarray) -> np.ndarray:
        if len(self.ids) == 0:
            return np.zeros(len(ids), dtype=np.bool_)
        places = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)
        return self.ids[places] == ids
