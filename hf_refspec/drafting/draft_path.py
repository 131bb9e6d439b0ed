"""The path of a draft model: which tokens it drafted itself, and which it took from others."""

from __future__ import annotations

import numpy as np

from .calibration import Calibration
from .tree import ROOT, DraftTree


class DraftPath:
    """A path that an assistant goes along, beside what other sources drafted.

    Attributes:
        tokens (`list[int]`): Its tokens. The assistant has yet to read the last one, or several
            that others have drafted.
        nodes (`list[int]`): The nodes of `tree` along the path, as far as there are any.
        prob (`float`): An estimate that all of the path is accepted.
        unread (`int`): At how many places of the path, its beginning among them, the assistant has
            not drafted anything.
    """

    def __init__(self, known: DraftTree) -> None:
        self.tokens: list[int] = []
        self.nodes: list[int] = []
        self.prob = 1.0
        self.unread = 1
        self._known = known
        self._node_tokens: list[int] = []
        self._parents: list[int] = []
        self._probs: list[float] = []

    @property
    def tree(self) -> DraftTree:
        """All nodes so far, with the assistant's own estimates."""
        tokens = np.array(self._node_tokens, dtype=np.int64)
        parents = np.array(self._parents, dtype=np.int32)
        return DraftTree(tokens, parents, np.array(self._probs, dtype=np.float32))

    @property
    def missed(self) -> float:
        """An estimate that the path is accepted, and then a token that nobody else has drafted."""
        known_prob, nodes = self._known_next()
        return self.prob * (1.0 - float(self._known.probs[nodes].sum()) / known_prob)

    def is_among(self, count: int) -> bool:
        """Whether the next node could be one of the `count` most probable nodes."""
        if not self.nodes:
            return True
        return int((np.array(self._probs) > self._probs[self.nodes[-1]]).sum()) < count

    def follow(self) -> bool:
        """Goes on with the best token that others have drafted, if there is one."""
        known_prob, nodes = self._known_next()
        if len(nodes) == 0:
            return False
        best = int(nodes[self._known.probs[nodes].argmax()])
        self.prob *= float(self._known.probs[best]) / known_prob
        self.tokens.append(int(self._known.tokens[best]))
        self.unread += 1
        return True

    def extend(
        self, best_tokens: np.ndarray, best_probs: np.ndarray, outcomes: Calibration
    ) -> None:
        """Adds the assistant's best next tokens, `(unread, k)`, at all unread places. The path
        goes on with the most probable of them: where others have drafted what the assistant does
        not expect, it turns off there."""
        best, best_depth = None, 0
        for place in range(self.unread):
            depth = len(self.tokens) + 1 - self.unread + place
            parent = self.nodes[depth - 1] if depth > 0 else ROOT
            tokens, probs = best_tokens[place].tolist(), best_probs[place].tolist()
            followed = self.tokens[depth : depth + 1]  # by the path, but at its end
            if followed and followed[0] not in tokens:
                tokens, probs = tokens + followed, probs + probs[-1:]
            before = self._probs[parent] if depth > 0 else 1.0
            for token, prob in zip(tokens, probs, strict=True):
                node = len(self._node_tokens)
                self._node_tokens.append(token)
                self._parents.append(parent)
                self._probs.append(before * min(prob, 1.0))
                if [token] == followed:
                    self.nodes.append(node)
                elif best is None or self._probs[node] > self._probs[best]:
                    best, best_depth = node, depth
        assert best is not None
        self.tokens = [*self.tokens[:best_depth], self._node_tokens[best]]
        self.nodes = [*self.nodes[:best_depth], best]
        self.unread = 1
        self.prob = float(outcomes.calibrated(self.tree).probs[best])
        known = self._known.along(self.tokens)
        if len(known) == len(self.tokens):
            self.prob = max(self.prob, float(self._known.probs[known[-1]]))

    def _known_next(self) -> tuple[float, np.ndarray]:
        """How probable other sources take the path to be, and their nodes at its end: 1 and none if
        they do not have it."""
        known = self._known.along(self.tokens)
        if len(known) < len(self.tokens):
            return 1.0, np.empty(0, dtype=np.int64)
        end = known[-1] if known else ROOT
        prob = float(self._known.probs[end]) if known else 1.0
        return max(prob, 1e-9), np.flatnonzero(self._known.parents == end)
