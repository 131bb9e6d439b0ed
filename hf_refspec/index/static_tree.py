"""The static draft tree of Token Recycling."""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import numpy as np

from ..kernels.kernel import kernel
from .best_first import TREE_TYPE
from .recycling import MOST_CONTEXT, find

# How many children each node has, the root first and then level by level: the template "2.2.2" of
# the authors' code (github.com/Luowaterbi/TokenRecycling), 80 nodes in 6 levels. The i-th child of
# a node is the i-th best next token of its own.
CHILDREN = (
    (8,),
    (8, 4, 3, 2, 1, 1, 1, 1),
    (8, 3, 2, 1, 1, 1, 1, 1, 2, 1, 0, 0, 1, 0, 0, 1, 0, 1, 1, 0, 0),
    (5, 2, 1, 1, 1, 0, 0, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 0, 0, 1, 1, 0, 0),
    (3, 1, 1, 0, 0, 1, 0, 0, 0, 0, 1, 0, 1, 0, 0),
    (2, 0, 0, 1, 0, 0, 0, 0),
    (0, 0, 0),
)
_CHILDREN = np.array([count for level in CHILDREN for count in level], dtype=np.int32)
# A node's rank is all that the tree knows; with this ratio the estimates add up to less than 1.
_RATIO = 0.45


@kernel(f"{TREE_TYPE}(Table, int64, int64)")
def static_tree(table, last, budget):
    """The tree of a table of single tokens below the last token, breadth first: its first `budget`
    nodes."""
    budget = min(budget, len(_CHILDREN))
    tokens = np.empty(budget, dtype=np.int64)
    parents = np.empty(budget, dtype=np.int32)
    estimates = np.empty(budget, dtype=np.float32)
    # The node at each place of the template, -2 for none.
    node_at = np.full(len(_CHILDREN), -2, dtype=np.int32)
    node_at[0] = -1
    context = np.full(MOST_CONTEXT, -1, dtype=np.int32)
    size, next_place = 0, 1
    for place in range(len(_CHILDREN)):
        first = next_place
        next_place += _CHILDREN[place]
        node = node_at[place]
        if node == -2 or _CHILDREN[place] == 0:
            continue
        context[0] = last if node < 0 else tokens[node]
        entry = find(table, context)
        if entry < 0:
            continue
        estimate = 1.0 if node < 0 else estimates[node]
        for i in range(min(_CHILDREN[place], table.tokens.shape[1])):
            estimate *= _RATIO
            if table.tokens[entry, i] < 0:
                break
            if size == budget:
                return tokens, parents, estimates
            tokens[size], parents[size] = table.tokens[entry, i], node
            estimates[size] = estimate
            node_at[first + i] = size
            size += 1
    return tokens[:size], parents[:size], estimates[:size]
