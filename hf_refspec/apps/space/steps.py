"""Each forward pass of a drafted answer, kept to be looked into."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...drafting.drafter import Drafter
from ...drafting.observation import Observation
from ...drafting.tree import ROOT, DraftTree
from ..shared.live_drafts import LiveDrafts


@dataclass(frozen=True)
class Step:
    """A forward pass of the target model.

    Attributes:
        tokens (`list[int]`): The tokens that it yielded: accepted draft tokens, and one that the
            target chose after them.
        tree ([`DraftTree`]): The draft that it verified.
        drafts (sequence of [`DraftTree`]): What each source had drafted for it, before merging.
    """

    tokens: list[int]
    tree: DraftTree
    drafts: Sequence[DraftTree]

    def accepted(self) -> list[int]:
        """The nodes of the tree that were accepted, from the root on."""
        return _followed(self.tree, self.tokens[:-1])

    def sources(self) -> list[int]:
        """Of each node the source that drafted it; the first one where several did."""
        paths: list[list[int]] = []
        for token, parent in zip(
            self.tree.tokens.tolist(), self.tree.parents.tolist(), strict=True
        ):
            paths.append([*(paths[parent] if parent != ROOT else []), token])
        return [
            next(
                (
                    i
                    for i, draft in enumerate(self.drafts)
                    if len(_followed(draft, path)) == len(path)
                ),
                0,
            )
            for path in paths
        ]


class RecordedDrafts(LiveDrafts):
    """[`LiveDrafts`] that know, while the listener is told of a step, what was verified in it.

    Args:
        drafters (sequence of [`Drafter`]): The sources.

    Attributes:
        verified ([`DraftTree`]): The draft of the last pass.
        drafts (`list[DraftTree]`): What each source had drafted for it.
    """

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        super().__init__(drafters)
        self.verified = DraftTree.empty()
        self.drafts: list[DraftTree] = []

    def observe(self, observation: Observation) -> None:
        self.verified = observation.verified
        self.drafts = self._trees
        super().observe(observation)


def _followed(tree: DraftTree, tokens: Sequence[int]) -> list[int]:
    """The nodes that these tokens lead to, as far as the tree has them."""
    children, node, nodes = tree.children(), ROOT, []
    for token in tokens:
        if (node, token) not in children:
            break
        node = children[node, token]
        nodes.append(node)
    return nodes
