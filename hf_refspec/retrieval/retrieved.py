"""What a search finds: ids and scores, best first."""

from __future__ import annotations

from dataclasses import dataclass

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
