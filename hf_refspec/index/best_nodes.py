"""The n-grams and the nodes of their draft trees that are accepted most often for their bytes.

A node is expected to be accepted as often as its n-gram occurs in the corpus, times the node's
probability. Where an n-gram is left out, the one without its first token is looked up in its place:
its own tree is worth only what it adds to that one's, and is kept only beside it.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..kernels.kernel import kernel
from .best_first import TreeArrays

_HALVINGS = 40  # of the range of prices, from 1e-12 to 1e12


def best_nodes(
    ngrams: Sequence[np.ndarray],
    counts: np.ndarray,
    trees: Sequence[TreeArrays],
    bytes_of: Callable[[int, int], int],
    max_bytes: int,
) -> np.ndarray:
    """Chooses how many nodes of each tree, the most probable first, to keep: int64 of shape
    `(entries,)`, 0 where the n-gram is left out. `ngrams` are those of each order from 1 on, int32
    of shape `(count, n)`, `counts` how often each occurs.

    Every byte has one price in accepted tokens. A node is kept if it is worth its bytes, and an
    n-gram if its nodes are worth theirs and its own. The price is the lowest at which `bytes_of`
    the numbers of n-grams and nodes is at most `max_bytes`."""
    starts = np.cumsum([0, *(len(tokens) for tokens, _, _ in trees)])
    tokens, parents, probs = (np.concatenate(parts) for parts in zip(*trees, strict=True))
    index: dict[tuple[int, ...], int] = {}
    for order in ngrams:
        for ngram in order.tolist():
            index[tuple(ngram)] = len(index)
    # The index of each n-gram without its first token.
    shorter = np.array([index.get(ngram[1:], -1) for ngram in index], dtype=np.int64)
    replaced = replaced_nodes(starts, tokens, parents, shorter)
    sizes = np.diff(starts)
    if bytes_of(len(trees), len(tokens)) <= max_bytes:
        return sizes
    many = 1 << 20
    entry_bytes = bytes_of(many, 0) / many
    node_bytes = bytes_of(0, many) / many
    low, high = 1e-12, 1e12
    best = np.zeros_like(sizes)
    for _ in range(_HALVINGS):
        price = (low * high) ** 0.5
        sizes = worth_keeping(
            starts, probs, counts, shorter, replaced, price * entry_bytes, price * node_bytes
        )
        if bytes_of(int((sizes > 0).sum()), int(sizes.sum())) <= max_bytes:
            best, high = sizes, price
        else:
            low = price
    return best


@kernel("int32[::1](int64[::1], int64[::1], int32[::1], int64[::1])", drafts=False)
def replaced_nodes(starts, tokens, parents, shorter):
    """For each node the index of the node with the same path in the tree of the shorter n-gram, -1
    if there is none."""
    replaced = np.full(len(tokens), -1, dtype=np.int32)
    for entry in range(len(shorter)):
        other = shorter[entry]
        if other < 0:
            continue
        for node in range(starts[entry], starts[entry + 1]):
            parent = parents[node]
            if parent >= 0:
                parent = replaced[starts[entry] + parent]
                if parent < 0:
                    continue
            for same in range(starts[other], starts[other + 1]):
                if parents[same] == parent and tokens[same] == tokens[node]:
                    replaced[node] = same - starts[other]
                    break
    return replaced


_WORTH = (
    "int64[::1](int64[::1], float32[::1], int64[::1], int64[::1], int32[::1], float64, float64)"
)


@kernel(_WORTH, drafts=False)
def worth_keeping(starts, probs, counts, shorter, replaced, entry_price, node_price):
    """How many nodes of each tree are worth their price and, together, that of their n-gram."""
    sizes = np.zeros(len(counts), dtype=np.int64)
    for entry in range(len(counts)):  # the shorter n-grams come first
        other = shorter[entry]
        if other >= 0 and sizes[other] == 0:
            continue
        start = starts[entry]
        end = starts[entry + 1]
        size = 0
        worth = -entry_price
        while start + size < end and counts[entry] * probs[start + size] >= node_price:
            worth += counts[entry] * probs[start + size] - node_price
            size += 1
        for node in range(start, end):
            if other >= 0 and 0 <= replaced[node] < sizes[other]:
                worth -= counts[entry] * probs[node]
        sizes[entry] = size if worth > 0 else 0
    return sizes
