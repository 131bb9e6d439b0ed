"""The path of a draft model: which tokens it drafted itself, and which it took from others."""

from __future__ import annotations

import numpy as np

from .calibration import Calibration
from .top_tokens import TopTokens
from .tree import ROOT, DraftTree


class DraftPath:
    """A path that an assistant goes along, beside what other sources drafted.

    Attributes:
        tokens (`list[int]`): Its tokens. The assistant has yet to read the last one, or several
            that others have drafted.
        nodes (`list[int]`): The nodes of `tree` along the path, as far as there are any.
        prob (`float`): An estimate that all of the path is accepted.
        unread (`int`): How many places of the path, its beginning among them, the assistant has not
            said anything of.
    """

    def __init__(self, known: DraftTree) -> None:
        self.tokens: list[int] = []
        self.nodes: list[int] = []
        self.prob = 1.0
        self.unread = 1
        self._known, self._known_children = known, known.children()
        self._place: int | None = ROOT  # the path's end in `known`, if it is there
        self._node_tokens: list[int] = []
        self._parents: list[int] = []
        self._probs: list[float] = []

    @property
    def tree(self) -> DraftTree:
        """All nodes so far, with the assistant's own estimates."""
        parents = np.array(self._parents, dtype=np.int32)
        probs = np.array(self._probs, dtype=np.float32)
        return DraftTree(np.array(self._node_tokens, dtype=np.int64), parents, probs)

    @property
    def missed(self) -> float:
        """An estimate that the path is accepted, and then a token that nobody else has drafted."""
        held = float(self._known.probs[self._known_next()].sum())
        return self.prob * (1.0 - held / self._known_prob)

    def is_among(self, count: int) -> bool:
        """Whether what follows could be one of so many most probable nodes."""
        if not self.nodes:
            return True
        return int((np.array(self._probs) > self._probs[self.nodes[-1]]).sum()) < count

    def follow(self) -> bool:
        """Goes on with the best token that others have drafted, if there is one."""
        nodes = self._known_next()
        if len(nodes) == 0:
            return False
        best = int(nodes[self._known.probs[nodes].argmax()])
        self.prob *= float(self._known.probs[best]) / self._known_prob
        self._go(int(self._known.tokens[best]))
        self.unread += 1
        return True

    def extend(self, top: TopTokens, outcomes: Calibration) -> None:
        """Adds the assistant's next tokens at all unread places. The path goes on with the most
        probable of them: where others have drafted what the assistant does not expect, it turns
        off there."""
        first = len(self.tokens) + 1 - self.unread
        leaves: list[int] = []
        for i in range(self.unread):
            parent = self.nodes[first + i - 1] if first + i > 0 else ROOT
            start = len(self._node_tokens)
            for token, prob in zip(
                top.tokens[0, i].tolist(), top.probs[0, i].tolist(), strict=True
            ):
                self._add(parent, token, prob)
            if i + 1 < self.unread:
                token = self.tokens[first + i]
                if token not in self._node_tokens[start:]:
                    self._add(parent, token, float(top.probs[0, i, -1]))
                self.nodes.append(self._node_tokens.index(token, start))
            leaves += range(start, len(self._node_tokens))
        leaves = [leaf for leaf in leaves if leaf not in self.nodes]
        self._turn_to(max(leaves, key=lambda leaf: self._probs[leaf]))
        self.prob = float(outcomes.calibrated(self.tree).probs[self.nodes[-1]])
        if self._place is not None:
            self.prob = max(self.prob, float(self._known.probs[self._place]))
        self.unread = 1

    def _turn_to(self, node: int) -> None:
        """Makes it the path to a node."""
        self.nodes, self.tokens, self._place = [], [], ROOT
        while node != ROOT:
            self.nodes.insert(0, node)
            node = self._parents[node]
        for each in self.nodes:
            self._go(self._node_tokens[each])

    def _add(self, parent: int, token: int, prob: float) -> None:
        before = self._probs[parent] if parent != ROOT else 1.0
        self._node_tokens.append(token)
        self._parents.append(parent)
        self._probs.append(before * min(prob, 1.0))

    def _go(self, token: int) -> None:
        if self._place is not None:
            self._place = self._known_children.get((self._place, token))
        self.tokens.append(token)

    @property
    def _known_prob(self) -> float:
        """How probable other sources take the path to be, if they have it."""
        if self._place is None or self._place == ROOT:
            return 1.0
        return max(float(self._known.probs[self._place]), 1e-9)

    def _known_next(self) -> np.ndarray:
        """The nodes of other sources at the path's end."""
        if self._place is None:
            return np.empty(0, dtype=np.int64)
        return np.flatnonzero(self._known.parents == self._place)
