"""Draft trees as arrays, against twins that know every node by its path."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_refspec.drafting.tree import (
    FOREIGN_TOKEN,
    LATE_PARENT,
    RISING_PROB,
    SAME_TOKEN,
    DraftTree,
    best_path,
    merged,
    tree_ancestors,
    tree_depths,
    tree_fault,
)
from tests.helpers.trees import draft_trees, nodes_of

VOCAB_SIZE = 3


# --- one tree


@st.composite
def parents_lists(draw):
    return [draw(st.integers(-1, node - 1)) for node in range(draw(st.integers(0, 12)))]


def path_to(parents, node):
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


@given(parents_lists())
def test_depths_and_ancestors_are_those_of_the_path(parents):
    array = np.array(parents, np.int32)
    depths, ancestors = tree_depths(array), tree_ancestors(array)
    for node in range(len(parents)):
        path = path_to(parents, node)
        assert depths[node] == len(path)
        assert np.flatnonzero(ancestors[node]).tolist() == sorted(path)


@given(parents_lists(), st.randoms(use_true_random=False))
def test_best_path_has_the_largest_sum_of_probs(parents, random):
    probs = np.array([random.random() for _ in parents], np.float32)
    path = best_path(np.array(parents, np.int32), probs)
    sums = {tuple(path_to(parents, n)): probs[path_to(parents, n)].sum() for n in range(len(probs))}
    if parents:
        assert sums[tuple(path.tolist())] == pytest.approx(max(sums.values()))
    else:
        assert len(path) == 0


def fault_of(nodes) -> int:
    for node, (token, parent, prob) in enumerate(nodes):
        if not 0 <= token < VOCAB_SIZE:
            return FOREIGN_TOKEN
        if not -1 <= parent < node:
            return LATE_PARENT
        if (token, parent) in [each[:2] for each in nodes[:node]]:
            return SAME_TOKEN
        if not 0 <= prob <= (nodes[parent][2] if parent >= 0 else 1):
            return RISING_PROB
    return 0


@given(
    st.lists(
        st.tuples(
            st.integers(-1, VOCAB_SIZE),
            st.integers(-2, 5),
            st.sampled_from([-0.5, 0.0, 0.25, 0.5, 1.0, 1.5, math.nan]),
        ),
        max_size=6,
    )
)
def test_tree_fault_is_what_is_wrong_with_the_first_node_that_is_not_right(nodes):
    tokens, parents, probs = zip(*nodes, strict=True) if nodes else ((), (), ())
    arrays = np.array(tokens, np.int64), np.array(parents, np.int32), np.array(probs, np.float32)
    assert tree_fault(*arrays, VOCAB_SIZE) == fault_of(nodes)


# --- merging


def merge_slowly(trees: list[DraftTree]) -> dict[tuple[int, ...], float]:
    """The twin of `merge_trees`: all nodes, of which it keeps the most probable."""
    failing: dict[tuple[int, ...], float] = {}
    for tree in trees:
        for path, prob in nodes_of(tree).items():
            failing[path] = failing.get(path, 1.0) * (1 - prob)
    probs = {(): 1.0}
    for path in sorted(failing, key=len):
        probs[path] = min(1 - failing[path], probs[path[:-1]])
    del probs[()]
    return probs


@given(st.lists(draft_trees(VOCAB_SIZE, 8), min_size=1, max_size=4), st.integers(0, 20))
def test_the_most_probable_nodes_of_all_trees_are_kept(trees, budget):
    tree = merged(trees, budget)
    tree.checked(VOCAB_SIZE)
    expected = merge_slowly(trees)
    best = sorted(expected.values(), reverse=True)[:budget]
    assert tree.probs.tolist() == pytest.approx(best, abs=1e-5)
    assert (np.diff(tree.probs) <= 0).all()
    for path, prob in nodes_of(tree).items():
        assert prob == pytest.approx(expected[path], abs=1e-5)
