"""Estimates of acceptance, corrected by what was accepted."""

from __future__ import annotations

import numpy as np

from ..index.calibration import CLASSES, calibrate, record_outcome
from .tree import DraftTree

# Expected acceptances that, all of them missed, halve the trust in a source: more are steadier,
# fewer correct it sooner.
PSEUDO_COUNT = 2.0
# The prior of a conditional probability p is p * p**PRIOR_EXPONENT where a failed draft costs a
# pass: the larger, the fewer small estimates are tried and can prove right.
PRIOR_EXPONENT = 2.0
# Counts are halved after so many expected acceptances: the fewer, the sooner a change of the text
# is noticed, and the noisier the estimates.
MEMORY = 48.0


class Calibration:
    """Compares how often one source's nodes were accepted with its own estimates.

    For each class of depth and of conditional probability (of a node, once its parent is accepted)
    it keeps the sum of the estimates and the number of acceptances among the nodes with a known
    outcome. A new estimate is multiplied by their ratio. A class with few outcomes backs off to all
    classes of its depth, and these to the source's own estimates, by a pseudo-count."""

    def __init__(self, prior_exponent: float = 0.0) -> None:
        self._prior_exponent = prior_exponent
        self._expected = np.zeros(CLASSES, dtype=np.float64)
        self._accepted = np.zeros(CLASSES, dtype=np.float64)

    def calibrated(self, tree: DraftTree) -> DraftTree:
        """The same tree with corrected estimates."""
        prior = PSEUDO_COUNT, self._prior_exponent
        probs = calibrate(tree.parents, tree.probs, self._expected, self._accepted, *prior)
        return DraftTree(tree.tokens, tree.parents, probs)

    def record(self, tree: DraftTree, tokens: np.ndarray) -> int:
        """Learns from the tokens (int64) that followed a draft, a tree with the source's own
        estimates; returns how many of them it had foreseen."""
        return record_outcome(
            tree.tokens, tree.parents, tree.probs, tokens, MEMORY, self._expected, self._accepted
        )
