"""Estimates of acceptance, corrected by what was accepted."""

from __future__ import annotations

import numpy as np

from ..index.kernels import calibrate, record_outcome
from .tree import DraftTree

# A node is judged among nodes of a similar depth whose parent promised it a similar share.
DEPTHS, SHARES = 5, 8
# What it takes to believe a correction: so many expected acceptances halve the trust in a source
# of which nothing is accepted.
PRIOR = 2.0
# Where it costs something to believe, a share s is first taken for s * s**DOUBT: the smaller, the
# more is promised in vain, and drafts that are not verified show for nothing what they are worth.
DOUBT = 2.0
# Older observations count half each time so many acceptances have been expected since.
MEMORY = 48.0
# What they still count when another text begins.
KEPT = 0.75


class Calibration:
    """How often the nodes of one source were accepted, beside how often it had estimated.

    For each class of depth and of conditional probability (of a node, once its parent is accepted)
    it keeps the sum of the estimates and the number of acceptances among the nodes whose fate is
    known. A new estimate is multiplied by their ratio. A class of which little is known leans on
    all classes of its depth, and these on the source's own estimates.

    Args:
        doubt (`float`, *optional*, defaults to 0.0): The more, the less of a small estimate is
            believed before anything is known, see `DOUBT`.
    """

    def __init__(self, doubt: float = 0.0) -> None:
        self._doubt = doubt
        self._expected = np.zeros((DEPTHS, SHARES), dtype=np.float64)
        self._accepted = np.zeros((DEPTHS, SHARES), dtype=np.float64)

    def calibrated(self, tree: DraftTree) -> DraftTree:
        """The same tree with corrected probabilities.

        Args:
            tree ([`DraftTree`]): With the source's own estimates.
        """
        probs = np.empty(len(tree), dtype=np.float32)
        expected, accepted = self._expected.sum(axis=1), self._accepted.sum(axis=1)
        of_depth = (accepted + PRIOR) / (expected + PRIOR)
        counts = self._expected, self._accepted
        calibrate(tree.parents, tree.probs, *counts, of_depth, PRIOR, self._doubt, probs)
        return DraftTree(tree.tokens, tree.parents, probs)

    def record(self, tree: DraftTree, tokens: np.ndarray) -> int:
        """Learns from what came after a draft.

        Args:
            tree ([`DraftTree`]): With the source's own estimates, as it was drafted.
            tokens (`np.ndarray`, int64 of shape `(m,)`): The tokens that followed.

        Returns:
            `int`: How many of them the draft had foreseen.
        """
        return record_outcome(
            tree.tokens, tree.parents, tree.probs, tokens, MEMORY, self._expected, self._accepted
        )

    def fade(self) -> None:
        """Counts all observations less: another text begins."""
        self._expected *= KEPT
        self._accepted *= KEPT
