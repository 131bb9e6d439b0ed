"""Search in two stages: another index finds candidates, and `score_rows` ranks them.

The index rounds as it likes, and differently with other queries in the batch; what a search returns
does not depend on that.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .retrieved import Retrieved
from .vector_index import Metric, VectorIndex

# Candidates that an approximate index walks at least: which of them it finds must not depend on how
# many are wanted, for a request cache wants more than a step.
LEAST_WALKED = 128
# Candidates beyond k that an exact search takes at least: so many may be as good as the k-th.
_SPARE = 16
_UNIT_ROUNDOFF = 2.0**-24


class CandidateIndex(VectorIndex):
    """Ranks the candidates that another index finds.

    Args:
        vectors (`np.ndarray`, float32 of shape `(n, d)`): What is searched.
        lengths (`np.ndarray`, float32 of shape `(n,)`): Their squared lengths.
        metric (`"inner_product"` or `"l2"`): What a score is.
        candidates (callable): Takes queries (float32 of shape `(q, d)`) and a number of candidates.
            It returns for each query their ids (int64 of shape `(m,)`, in any order), and a bound
            on the scores of all other vectors, as it computes them.
        exact (`bool`): Whether a search returns the best of all vectors, or of its candidates.
        most_candidates (`int`, *optional*): The most that `candidates` finds for a query.
    """

    def __init__(
        self,
        vectors: np.ndarray,
        lengths: np.ndarray,
        metric: Metric,
        candidates: Callable[[np.ndarray, int], list[tuple[np.ndarray, float]]],
        exact: bool,
        most_candidates: int | None = None,
    ) -> None:
        super().__init__(vectors, metric)
        self._candidates = candidates
        self._exact = exact
        self._most_candidates = min(most_candidates or len(vectors), len(vectors))
        self._longest = float(lengths.max()) ** 0.5

    def search(self, queries: np.ndarray, k: int) -> list[Retrieved]:
        k = min(k, len(self.vectors))
        if self._exact:
            return self._exact_search(queries, k, k + max(k // 8, _SPARE))
        return [found for found, _ in self._best_candidates(queries, k, max(k, LEAST_WALKED))]

    def _best_candidates(
        self, queries: np.ndarray, k: int, count: int
    ) -> list[tuple[Retrieved, float]]:
        """For each query the best of `count` candidates, and what no other vector exceeds."""
        candidates = self._candidates(queries, min(count, self._most_candidates))
        return [
            (Retrieved.best(ids, self.score(query, ids), k), bound)
            for query, (ids, bound) in zip(queries, candidates, strict=True)
        ]

    def _exact_search(self, queries: np.ndarray, k: int, count: int) -> list[Retrieved]:
        """Takes `count` candidates, and four times as many for those queries for which a vector
        that is as good as the k-th may be missing."""
        best = self._best_candidates(queries, k, count)
        found = [each for each, _ in best]
        if count >= self._most_candidates:
            return found
        unsure = [
            i
            for i, (query, (each, bound)) in enumerate(zip(queries, best, strict=True))
            if len(each) < k  # where vectors are not finite
            or each.scores[k - 1] <= bound + self._rounding(query, float(each.scores[k - 1]))
        ]
        if unsure:
            again = self._exact_search(queries[unsure], k, 4 * count)
            for i, each in zip(unsure, again, strict=True):
                found[i] = each
        return found

    def _rounding(self, query: np.ndarray, score: float) -> float:
        """How far apart the index's and our score of a vector can be that is as good as this one.

        A sum of d products in any order is off by at most d roundings of the sum of their absolute
        values, and thus of the product of both lengths.
        """
        length = float(np.linalg.norm(query.astype(np.float64)))
        roundings = 2 * (len(query) + 2) * _UNIT_ROUNDOFF
        if self.metric == "inner_product":
            return roundings * length * self._longest
        reach = length + max(-score, 0.0) ** 0.5  # a vector that is as near is no longer
        return 2 * roundings * (reach**2 + length**2)
