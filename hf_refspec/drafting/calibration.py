"""Estimates of acceptance, corrected by what was accepted."""

from __future__ import annotations

import numpy as np

from ..index.calibration import CLASSES, calibrate, record_outcome
from .tree import DraftTree

# So many expected acceptances of which none came true halve the trust in a source: the more, the
# steadier; the less, the sooner it is corrected.
PSEUDO_COUNT = 2.0
# The prior of a conditional probability p is p * p**PRIOR_EXPONENT where a draft that fails costs a
# pass: the larger, the fewer small promises are tried, and the fewer of them can show their worth.
PRIOR_EXPONENT = 2.0
# Older observations count half each time so many acceptances have been expected since: the less,
# the sooner a change of the text is noticed, and the noisier is what is known.
MEMORY = 48.0


class Calibration:
    """How often the nodes of one source were accepted, beside how often it had estimated.

    For each class of depth and of conditional probability (of a node, once its parent is accepted)
    it keeps the sum of the estimates and the number of acceptances among the nodes whose fate is
    known. A new estimate is multiplied by their ratio. A class of which little is known leans on
    all classes of its depth, and these on the source's own estimates, by a pseudo-count.

    Args:
        prior_exponent (`float`, *optional*, defaults to 0.0): The larger, the less a small estimate
            counts before anything is known, see `PRIOR_EXPONENT`.
    """

    def __init__(self, prior_exponent: float = 0.0) -> None:
        self._prior_exponent = prior_exponent
        self._expected = np.zeros(CLASSES, dtype=np.float64)
        self._accepted = np.zeros(CLASSES, dtype=np.float64)

    def calibrated(self, tree: DraftTree) -> DraftTree:
        """The same tree with corrected probabilities.

        Args:
            tree ([`DraftTree`]): With the source's own estimates.
        """
        prior = PSEUDO_COUNT, self._prior_exponent
        probs = calibrate(tree.parents, tree.probs, self._expected, self._accepted, *prior)
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
