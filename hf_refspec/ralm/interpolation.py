"""How much the neighbours of a kNN-LM count, chosen on held-out text.

With one lambda for all contexts, far neighbours count as much as near ones, which helps on texts
like those of the datastore and harms on all others. Each range of distances of the nearest
neighbour therefore has its own lambda, falling with the distance (Drozdov et al. 2022, "You can't
pick your neighbors, or can you? When and how to rely on retrieval in the kNN-LM").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np

from ..store.schema import AtMost, Range

# The fewest tokens of a range of distances, and the most ranges.
LEAST_TOKENS = 64
_MOST_RANGES = 12
# Temperatures, in relation to the median distance of all neighbours.
_TEMPERATURES = 2.0 ** np.arange(-9, 3)
# Tokens without any right neighbour that are added for each token of the farthest range, fewer for
# nearer ones: other texts, which the held-out one cannot represent, have theirs there.
_UNLIKE = 0.5
_BISECTIONS = 40

_PERPLEXITY = Range(0, 1e305)


@dataclass(frozen=True)
class Interpolation:
    """The settings of a kNN-LM that were chosen on held-out text."""

    k: Annotated[int, Range(1, 2**31 - 1)]  # neighbours that are looked up
    temperature: Annotated[float, Range(1e-45, 1e45)]  # divides their squared distances
    # Where one range of the nearest neighbour's squared distance ends and the next begins.
    distances: Annotated[list[Annotated[float, Range(0, 1e45)]], AtMost(_MOST_RANGES - 1)]
    # How much the neighbours count in each range, descending; one more than `distances`.
    lambdas: Annotated[list[Annotated[float, Range(0, 1)]], AtMost(_MOST_RANGES)]
    tokens: Annotated[int, Range(1, 2**31 - 1)]  # held-out ones that they were chosen on
    perplexity_alone: Annotated[float, _PERPLEXITY]  # of the model on these
    perplexity: Annotated[float, _PERPLEXITY]  # of the kNN-LM on these

    def check(self) -> None:
        """Refuses fields that do not fit together."""
        if len(self.lambdas) != len(self.distances) + 1 or self.distances != sorted(self.distances):
            raise ValueError(f"its {len(self.lambdas)} lambdas do not fit its distances")

    def lambda_at(self, distance: float) -> float:
        """How much neighbours count if the nearest is at this squared distance."""
        return self.lambdas[int(np.searchsorted(self.distances, distance))]

    def __str__(self) -> str:
        first, last = self.lambdas[0], self.lambdas[-1]
        lambdas = f"{first:.2f}" if first == last else f"{first:.2f} (near) to {last:.2f} (far)"
        return f"lambda {lambdas}, temperature {self.temperature:.3g}, k {self.k:,}"


def choose(scores: np.ndarray, right: np.ndarray, log_lm: np.ndarray) -> Interpolation:
    """Chooses the lambdas and the temperature with the lowest perplexity.

    For one temperature and range of distances, the likelihood is concave in lambda: its maximum is
    where the derivative is zero. Lambda 0 is the model alone, so that no choice is worse.

    Args:
        scores (`np.ndarray`, float32 of shape `(n, k)`): For each held-out token, minus the squared
            distances of its neighbours, the nearest first.
        right (`np.ndarray`, bool of shape `(n, k)`): Which of them were followed by that token.
        log_lm (`np.ndarray`, float64 of shape `(n,)`): The token's log-probability by the model.
    """
    count, k = scores.shape
    nearest = np.maximum(-scores[:, 0].astype(np.float64), 0)
    distances = _edges(nearest)
    ranges = np.searchsorted(distances, nearest)
    unlikes = np.linspace(0, _UNLIKE, len(distances) + 2)[1:].tolist()
    relative = scores - scores[:, :1]
    scale = float(-np.median(scores)) or 1.0
    lm = np.exp(np.maximum(log_lm, -700))  # above zero
    best, chosen, temperature = -np.inf, np.zeros(len(distances) + 1), scale
    for candidate in (scale * _TEMPERATURES).tolist():
        weights = np.exp(relative / np.float32(candidate))
        knn = (weights * right).sum(axis=1) / weights.sum(axis=1)
        each = [_best_lambda((knn / lm)[ranges == i], unlike) for i, unlike in enumerate(unlikes)]
        # A lower lambda than the best is not worse than none either.
        lambdas = np.minimum.accumulate(each)
        mean = float(np.log((1 - lambdas[ranges]) * lm + lambdas[ranges] * knn).mean())
        if mean > best:
            best, chosen, temperature = mean, lambdas, candidate
    return Interpolation(
        k=k,
        temperature=temperature,
        distances=distances.tolist(),
        lambdas=chosen.tolist(),
        tokens=count,
        perplexity_alone=float(np.exp(-np.log(lm).mean())),
        perplexity=float(np.exp(-best)),
    )


def _edges(nearest: np.ndarray) -> np.ndarray:
    """Distances that cut the tokens into ranges of about the same size, none of them empty."""
    count = min(len(nearest) // LEAST_TOKENS, _MOST_RANGES)
    quantiles = np.quantile(nearest, np.arange(1, count) / count, method="lower")
    return np.unique(quantiles[quantiles < nearest.max()])


def _best_lambda(ratios: np.ndarray, unlike: float) -> float:
    """The lambda of greatest likelihood, given how many times as probable the neighbours find each
    token as the model does, with `unlike` more tokens each that they do not find at all."""
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        slope = ((ratios - 1) / (1 - middle + middle * ratios)).sum()
        slope -= unlike * len(ratios) / (1 - middle)
        low, high = (middle, high) if slope > 0 else (low, middle)
    return low
