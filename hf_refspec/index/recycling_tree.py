"""A draft tree grown from a recycling table, best node first.

Contexts of several lengths, the commonest tokens and the last position's runners-up are pooled
log-linearly: each contributes a power of its probability.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from ..kernels.kernel import kernel, kernel_type
from .best_first import TREE_TYPE, divide, grower, uncounted
from .recycling import MOST_CONTEXT, Table, find

# How many of a node's runners-up are proposed again after it.
RUNNERS_UP = 8
# A probability counts as its multiple of this one: much smaller ones count as nothing.
LEAST_PROB = 0.003
# A less probable child is dropped: it would hardly ever be among the best nodes.
LEAST_CHILD = 1e-4


class Pooling(NamedTuple):
    """How a next token's probability is pooled, by the length of the longest known context.

    Attributes:
        exponents (`np.ndarray`, float64 of shape `(1 + MOST_CONTEXT, MOST_CONTEXT + 2)`): Of
            contexts of 1, 2 and 3 tokens, of frequencies and of the last position.
        misses (`np.ndarray`, float64 of shape `(1 + MOST_CONTEXT,)`): The score of all unknown
            tokens.
    """

    exponents: np.ndarray
    misses: np.ndarray

    def flattened(self, power: float) -> Pooling:
        """All scores raised to a power."""
        return Pooling(power * self.exponents, self.misses**power)


kernel_type("Pooling", Pooling, "float64[:, ::1], float64[::1]")


class _Known(NamedTuple):
    """The data that the tree grows out of: the arguments of `recycling_tree`, and its own notes."""

    table: Table
    longest: int
    text: np.ndarray
    commonest: np.ndarray
    counts: np.ndarray
    counted: float
    pooling: Pooling
    # The best at the position before the text's end, at the root and at each node.
    best_tokens: np.ndarray  # int32, (2 + budget, RUNNERS_UP), -1 for none
    best_probs: np.ndarray  # float32
    number: np.ndarray  # int64 of shape (1,), how many proposals there are so far
    # The present node's last tokens, the last one first, and the entries of its contexts.
    context: np.ndarray  # int32 of shape (MOST_CONTEXT,)
    entries: np.ndarray  # int64


@kernel(
    f"{TREE_TYPE}(Table, int64, int32[::1], int32[::1], float32[::1], float64, int32[::1],"
    "float32[::1], Pooling, int64, boolean)"
)
def recycling_tree(
    table,
    longest,
    text,
    commonest,
    counts,
    counted,
    last_tokens,
    last_probs,
    pooling,
    budget,
    chain,
):
    """Grows a draft tree, best node first.

    A token's score at a node is a product: of the probabilities that it had after the last 1, 2 and
    3 tokens, of its frequency, and of the probability that it had one position earlier (a token
    that was nearly chosen often comes next). Each factor is 1 + p / LEAST_PROB to the power of an
    exponent, and 1 where nothing is known. A token's probability is its score divided by the sum of
    all scores and the score of all unknown tokens together.

    `text` (n,) is the last tokens, MOST_CONTEXT if it has them; `commonest` (c,) is proposed
    everywhere; `counts` (V,) is how often each token came, `counted` all of them; `last_tokens` and
    `last_probs` (k,) are what the target expected in place of the last token."""
    best_tokens = np.empty((2 + budget, RUNNERS_UP), dtype=np.int32)
    best_probs = np.empty((2 + budget, RUNNERS_UP), dtype=np.float32)
    best_tokens[0], best_probs[0] = -1, 0.0
    for i in range(min(RUNNERS_UP, len(last_tokens))):
        best_tokens[0, i], best_probs[0, i] = last_tokens[i], last_probs[i]
    found = _Known(
        table,
        longest,
        text,
        commonest,
        counts,
        counted,
        pooling,
        best_tokens,
        best_probs,
        np.ones(1, np.int64),  # grow() needs a first proposal; it proposes nothing
        np.empty(MOST_CONTEXT, np.int32),
        np.empty(MOST_CONTEXT, np.int64),
    )
    per_node = MOST_CONTEXT * table.tokens.shape[1] + len(commonest) + RUNNERS_UP
    return _grow_context(found, 1, 1 + (1 + budget) * per_node, per_node, budget, chain)


@uncounted
def expand_context(found, growth, first, node, depth, prob):
    for i in range(RUNNERS_UP):
        found.best_tokens[node + 2, i], found.best_probs[node + 2, i] = -1, 0.0
    start, known = _propose(found, growth, node)
    if found.number[0] == start:
        return 0
    count = divide(growth, start, node)
    weights = growth.weights
    children = growth.children
    exponents, total = found.pooling.exponents[known], found.pooling.misses[known]
    for child in children[:count]:
        token = growth.proposed[child]
        frequency = found.counts[token] / found.counted if token < len(found.counts) else 0.0
        score = weights[child] + exponents[MOST_CONTEXT] * _log_score(frequency)
        weights[child] = math.exp(score)
        total += weights[child]
    kept = 0
    for child in children[:count]:
        weights[child] /= total
        _note_best(found, node, growth.proposed[child], weights[child])
        weights[child] *= prob
        if weights[child] > LEAST_CHILD:
            children[kept] = child
            kept += 1
    return kept


_grow_context = grower(expand_context)


@uncounted
def _propose(found, growth, node):
    """Proposes all tokens that are known at a node, weighted by the logarithms of their factors.

    Returns:
        The first proposal, and the length of the longest context that is known.
    """
    context = found.context
    entries = found.entries
    place = np.int64(node)
    known = 0
    for i in range(MOST_CONTEXT):
        context[i] = entries[i] = -1
    for i in range(found.longest):
        context[i], place = _token_before(found, growth, place)
        if context[i] < 0:
            break
        entries[i] = find(found.table, context)
        known = i + 1 if entries[i] >= 0 else known
    exponents = found.pooling.exponents[known]
    start = found.number[0]
    number = start
    for i in range(MOST_CONTEXT):
        if entries[i] >= 0:
            tokens, probs = found.table.tokens[entries[i]], found.table.probs[entries[i]]
            number = _add(growth, number, tokens, probs, exponents[i])
    before = node + 1 if node < 0 else growth.parents[node] + 2
    tokens, probs = found.best_tokens[before], found.best_probs[before]
    number = _add(growth, number, tokens, probs, exponents[MOST_CONTEXT + 1])
    for token in found.commonest:
        if token >= 0:
            growth.proposed[number], growth.weights[number] = token, 0.0
            growth.following[number] = number + 1
            number += 1
    if number > start:
        growth.following[number - 1] = -1
    found.number[0] = number
    return start, known


@uncounted
def _token_before(found, growth, place):
    """The token at a place (-1 for none), and the place before it.

    Places from 0 on are nodes; below 0 they are positions in the text, from its end.
    """
    if place >= 0:
        return np.int32(growth.tokens[place]), np.int64(growth.parents[place])
    if len(found.text) + place < 0:
        return np.int32(-1), np.int64(place)
    return found.text[len(found.text) + place], np.int64(place - 1)


@uncounted
def _add(growth, number, tokens, probs, exponent):
    """Adds the proposals (k,) of one source; returns how many there are now."""
    for i in range(len(tokens)):
        if tokens[i] >= 0:
            growth.proposed[number] = tokens[i]
            growth.weights[number] = exponent * _log_score(probs[i])
            growth.following[number] = number + 1
            number += 1
    return number


@uncounted
def _log_score(prob):
    return math.log(1.0 + prob / LEAST_PROB)


@uncounted
def _note_best(found, node, token, prob):
    """Inserts a child among its node's best, the most probable first."""
    tokens, probs = found.best_tokens[node + 2], found.best_probs[node + 2]
    i = RUNNERS_UP - 1
    if prob <= probs[i]:
        return
    while i > 0 and probs[i - 1] < prob:
        tokens[i], probs[i] = tokens[i - 1], probs[i - 1]
        i -= 1
    tokens[i], probs[i] = token, prob
