"""The forward passes of a drafted answer, recorded for the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...drafting.tree import DraftTree


@dataclass(frozen=True)
class Step:
    """A forward pass of the target model: the tokens that it yielded, accepted draft tokens and one
    that the target chose after them; the tree that it verified; and what each source had drafted
    for it, before the drafts were merged."""

    tokens: list[int]
    tree: DraftTree
    drafts: Sequence[DraftTree]

    def accepted(self) -> list[int]:
        """The nodes of the tree that were accepted, from the root on."""
        return self.tree.along(self.tokens[:-1])

    def sources(self) -> list[int]:
        """The source that drafted each node; the first one if several did."""
        paths = [self.tree.path(node).tolist() for node in range(len(self.tree))]

        def drafted(source: int, path: list[int]) -> bool:
            return len(self.drafts[source].along(path)) == len(path)

        count = range(len(self.drafts))
        return [next((i for i in count if drafted(i, path)), 0) for path in paths]
