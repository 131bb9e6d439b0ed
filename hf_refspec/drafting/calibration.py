"""Estimates of acceptance, corrected by what was accepted."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import numpy as np
from numba import njit

from ..kernels.kernel import kernel
from .tree import DraftTree

if TYPE_CHECKING:
    from typing_extensions import Self

# A node is judged among nodes of a similar depth with a similar conditional probability. With more
# classes the nodes of a class are more alike, but fewer.
LAST_DEPTHS = (1, 2, 4, 8)  # the last of each class of depth; deeper nodes are one more class
LEAST_PROBS = (0.02, 0.05, 0.12, 0.25, 0.45, 0.7, 0.9)  # smaller ones are one more class
CLASSES = (len(LAST_DEPTHS) + 1, len(LEAST_PROBS) + 1)
# The expected acceptances that, if none comes true, halve the trust in a source: a larger number is
# steadier, a smaller one corrects it sooner.
PSEUDO_COUNT = 2.0
# The prior of a conditional probability p is p * p**PRIOR_EXPONENT where a failed draft costs a
# pass: the larger, the fewer small estimates are tried and can prove right.
PRIOR_EXPONENT = 1.0
# Counts are halved after this number of expected acceptances: a smaller one notices a change of the
# text sooner, and makes estimates noisier.
MEMORY = 48.0


class Outcomes:
    """The outcomes of drafts so far: a copy keeps them, a pickle of a drafter begins without."""

    def __init__(self, *arguments: Any) -> None:
        self._arguments = arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._arguments

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = type(self)(*self._arguments)
        vars(twin).update(copy.deepcopy(vars(self), memo))
        return twin


class Calibration(Outcomes):
    """Compares how often one source's nodes were accepted with its own estimates.

    For each class of depth and of conditional probability (of a node, once its parent is accepted)
    it keeps the sum of the estimates and the number of acceptances among the nodes with a known
    outcome. A new estimate is multiplied by their ratio. A class with few outcomes backs off to all
    classes of its depth, and these to the source's own estimates, by a pseudo-count."""

    def __init__(self, prior_exponent: float = 0.0) -> None:
        super().__init__(prior_exponent)
        self._prior_exponent = prior_exponent
        self._expected = np.zeros(CLASSES, dtype=np.float64)
        self._accepted = np.zeros(CLASSES, dtype=np.float64)

    def calibrated(self, tree: DraftTree) -> DraftTree:
        """The tree with corrected estimates."""
        probs = calibrate(
            tree.parents,
            tree.probs,
            self._expected,
            self._accepted,
            PSEUDO_COUNT,
            self._prior_exponent,
        )
        return DraftTree(tree.tokens, tree.parents, probs)

    def record(self, tree: DraftTree, tokens: np.ndarray) -> int:
        """Learns from the tokens (int64) that followed a draft; returns how many it had drafted."""
        return record_outcome(
            tree.tokens, tree.parents, tree.probs, tokens, MEMORY, self._expected, self._accepted
        )


@njit
def _classify(parents, probs, node, depths):
    """A node's probability once its parent is accepted, and its two classes; writes its depth."""
    parent = parents[node]
    depths[node] = 1 if parent < 0 else depths[parent] + 1
    before = probs[parent] if parent >= 0 else 1.0
    prob = probs[node] / before if before > 0 else 0.0
    depth_class = prob_class = 0
    for last in LAST_DEPTHS:
        depth_class += depths[node] > last
    for least in LEAST_PROBS:
        prob_class += prob >= least
    return prob, depth_class, prob_class


@kernel(
    "float32[::1](int32[::1], float32[::1], float64[:, ::1], float64[:, ::1], float64, float64)"
)
def calibrate(parents, probs, expected, accepted, pseudo_count, prior_exponent):
    """Corrects a tree's estimates by the outcomes of earlier ones, each class's `expected` and
    `accepted` nodes. `pseudo_count` is the weight of a depth's counts in each of its classes, and
    of the source's own estimates in a depth's counts; there a conditional probability p counts as
    p * p ** `prior_exponent`."""
    calibrated = np.empty(len(parents), dtype=np.float32)
    depths = np.empty(len(parents), dtype=np.int32)
    for node in range(len(parents)):
        prob, i, j = _classify(parents, probs, node, depths)
        of_depth = (accepted[i].sum() + pseudo_count) / (expected[i].sum() + pseudo_count)
        prior = pseudo_count * of_depth * prob**prior_exponent
        prob *= (accepted[i, j] + prior) / (expected[i, j] + pseudo_count)
        before = calibrated[parents[node]] if parents[node] >= 0 else np.float32(1.0)
        calibrated[node] = min(before * prob, before)
    return calibrated


@kernel(
    "int64(int64[::1], int32[::1], float32[::1], int64[::1], float64, float64[:, ::1],"
    "float64[:, ::1])"
)
def record_outcome(tokens, parents, probs, emitted, memory, expected, accepted):
    """Counts a draft's nodes whose parent was right; halves a class that expects more than
    `memory`. Returns how many of the emitted tokens are a path of the tree."""
    agreed = 0
    depths = np.empty(len(parents), dtype=np.int32)
    right = np.zeros(len(parents), dtype=np.bool_)
    for node in range(len(parents)):
        prob, i, j = _classify(parents, probs, node, depths)
        parent = parents[node]
        if depths[node] > len(emitted) or (parent >= 0 and not right[parent]):
            continue
        right[node] = tokens[node] == emitted[depths[node] - 1]
        agreed += right[node]
        expected[i, j] += prob
        accepted[i, j] += right[node]
        if expected[i, j] > memory:
            expected[i, j] *= 0.5
            accepted[i, j] *= 0.5
    return agreed
