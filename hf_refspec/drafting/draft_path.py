"""The path of a draft model: which tokens it drafted itself, and which it took from others."""

from __future__ import annotations

import numpy as np

from .calibration import Calibration
from .tree import ROOT, DraftTree


class DraftPath:
    """A path that an assistant goes along, beside what other sources drafted.

    Attributes:
        tree ([`DraftTree`]): All nodes that the assistant has drafted, with its own estimates.
        tokens (`list[int]`): The path's tokens. The assistant has yet to read the last one, or
            several that others have drafted.
        nodes (`list[int]`): The nodes of `tree` along the path, as far as there are any.
        prob (`float`): An estimate that all of the path is accepted.
        unread (`int`): At how many places of the path, its beginning among them, the assistant has
            not drafted anything.
    """

    def __init__(self, known: DraftTree) -> None:
        self.tree = DraftTree.empty()
        self.tokens: list[int] = []
        self.nodes: list[int] = []
        self.prob = 1.0
        self.unread = 1
        self._known = known

    @property
    def missed(self) -> float:
        """An estimate that the path is accepted, and then a token that nobody else has drafted."""
        known_prob, nodes = self._known_next()
        return self.prob * (1.0 - float(self._known.probs[nodes].sum()) / known_prob)

    def is_among(self, count: int) -> bool:
        """Whether the next node could be one of the `count` most probable nodes."""
        probs = self.tree.probs
        return not self.nodes or int((probs > probs[self.nodes[-1]]).sum()) < count

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
        arrays = self.tree.tokens, self.tree.parents, self.tree.probs
        tokens, parents, probs = (each.tolist() for each in arrays)
        best, best_depth = -1, 0
        for place in range(self.unread):
            depth = len(self.tokens) + 1 - self.unread + place
            parent = self.nodes[depth - 1] if depth > 0 else ROOT
            before = probs[parent] if depth > 0 else 1.0
            drafted = dict(zip(best_tokens[place].tolist(), best_probs[place], strict=True))
            followed = self.tokens[depth : depth + 1]  # by the path, but at its end
            for token in followed:
                drafted.setdefault(token, best_probs[place, -1])
            for token, prob in drafted.items():
                tokens.append(token)
                parents.append(parent)
                probs.append(before * min(float(prob), 1.0))
                if [token] == followed:
                    self.nodes.append(len(tokens) - 1)
                elif best < 0 or probs[-1] > probs[best]:
                    best, best_depth = len(tokens) - 1, depth
        self.tree = DraftTree(
            np.array(tokens, np.int64), np.array(parents, np.int32), np.array(probs, np.float32)
        )
        self.tokens = [*self.tokens[:best_depth], tokens[best]]
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
