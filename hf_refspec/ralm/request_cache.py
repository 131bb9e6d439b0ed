"""The request cache: what speculation retrieves from (RaLMSpec, arXiv 2401.14021, section 3)."""

from __future__ import annotations

import numpy as np

# Scoring more would take longer than the search that it saves.
MOST_HELD = 1 << 14


class RequestCache:
    """The ids (int64, ascending) that one request retrieved: the latest, at most `most` or as many
    as were added last."""

    def __init__(self, most: int = MOST_HELD) -> None:
        self._most = most
        self.ids = self._newest_first = np.empty(0, dtype=np.int64)

    def add(self, ids: np.ndarray) -> None:
        """Adds retrieved ids (int64 of shape `(m,)`, with repetitions)."""
        added = np.unique(ids)
        older = self._newest_first[~np.isin(self._newest_first, added, assume_unique=True)]
        self._newest_first = np.concatenate([added, older])[: max(self._most, len(added))]
        self.ids = np.sort(self._newest_first)
