"""Token Recycling as published ("Turning Trash into Treasure", arXiv 2408.08696, section 3), for
`hf-refspec bench`: a matrix of each token's 8 best next tokens, and a static tree of 80 nodes.

python benchmarks/published_recycling.py --max-draft-tokens 80 --drafters PublishedRecycling auto
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping, Sequence

import numpy as np

import hf_refspec as rs
from hf_refspec.apps.bench.measure import BY_NAME
from hf_refspec.apps.cli.main import main
from hf_refspec.drafting.contract import Call
from hf_refspec.drafting.tree import ROOT

# How many children each node has, the root first and then level by level: the template "2.2.2" of
# the authors' code (github.com/Luowaterbi/TokenRecycling). The i-th child of a node is the i-th
# best next token of its own.
CHILDREN = (
    (8,),
    (8, 4, 3, 2, 1, 1, 1, 1),
    (8, 3, 2, 1, 1, 1, 1, 1, 2, 1, 0, 0, 1, 0, 0, 1, 0, 1, 1, 0, 0),
    (5, 2, 1, 1, 1, 0, 0, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 0, 0, 1, 1, 0, 0),
    (3, 1, 1, 0, 0, 1, 0, 0, 0, 0, 1, 0, 1, 0, 0),
    (2, 0, 0, 1, 0, 0, 0, 0),
    (0, 0, 0),
)
# A node's rank is all that the tree knows; with this ratio the estimates add up to less than 1.
_RATIO = 0.45


class PublishedRecycling(rs.Drafter):
    """Drafts the static tree, breadth first; forks learn into one matrix. Nothing is drafted after
    a token that was not seen yet; the paper's matrix begins with zeros."""

    observed_top_k = 8

    def __init__(self) -> None:
        self.matrix: dict[int, list[int]] = {}

    def begin(self, prompt_ids: np.ndarray, vocab_size: int) -> None:
        self._last = int(prompt_ids[-1])

    def draft(self, budget: int, call: Call) -> rs.DraftTree:
        return static_tree(self.matrix, self._last, budget)

    def observe(self, observation: rs.Observation) -> None:
        if observation.top_tokens is not None:
            tokens = [self._last, *observation.verified.tokens.tolist()]
            self.matrix |= zip(tokens, observation.top_tokens[:, :8].tolist(), strict=True)
        self._last = int(observation.tokens[-1])

    def fork(self) -> PublishedRecycling:
        return copy.copy(self)


def static_tree(matrix: Mapping[int, Sequence[int]], last: int, budget: int) -> rs.DraftTree:
    """The first `budget` nodes of the tree below the token `last`."""
    nodes: list[tuple[int, int, float]] = []  # tokens, parents and probabilities
    level: list[tuple[int, int, float] | None] = [(last, ROOT, 1.0)]  # tokens, nodes, probabilities
    for counts in CHILDREN:
        below: list[tuple[int, int, float] | None] = []
        for parent, count in zip(level, counts, strict=True):
            row = matrix.get(parent[0]) if parent else None
            for rank in range(count):
                if parent is None or row is None or rank >= len(row):
                    below.append(None)
                    continue
                prob = parent[2] * _RATIO ** (rank + 1)
                below.append((row[rank], len(nodes), prob))
                nodes.append((row[rank], parent[1], prob))
        level = below
    tokens, parents, probs = zip(*nodes[:budget], strict=True) if nodes else ((), (), ())
    return rs.DraftTree(
        np.array(tokens, np.int64), np.array(parents, np.int32), np.array(probs, np.float32)
    )


if __name__ == "__main__":
    BY_NAME["PublishedRecycling"] = PublishedRecycling
    sys.exit(main(["bench", *sys.argv[1:]]))
