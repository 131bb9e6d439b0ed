"""Draft trees: what they tell of themselves, which are refused, and twins that know every node by
its path."""

import dataclasses
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

#         root
#        /    \
#      0: 5    2: 6
#      /  \       \
#   1: 7  3: 8    4: 7


def branching(**changes) -> DraftTree:
    tree = DraftTree(
        tokens=np.array([5, 7, 6, 8, 7]),
        parents=np.array([-1, 0, -1, 0, 2], np.int32),
        probs=np.array([0.5, 0.2, 0.4, 0.1, 0.35], np.float32),
    )
    return dataclasses.replace(tree, **changes)


def test_a_chain_is_its_own_best_chain():
    chain = DraftTree.chain([3, 1, 2], probs=[0.9, 0.5, 0.1])
    assert chain.is_chain and not branching().is_chain
    assert chain.parents.tolist() == [-1, 0, 1]
    assert chain.best_chain().tokens.tolist() == chain.path(2).tolist() == [3, 1, 2]
    assert chain.path(-1).tolist() == []
    assert DraftTree.chain([3]).probs.tolist() == [1.0]


@pytest.mark.parametrize("tree", [DraftTree.empty(), DraftTree([], [], [])])
def test_the_empty_tree_has_no_node_and_is_legal(tree):
    assert len(tree) == len(tree.best_chain()) == len(tree.checked(vocab_size=1)) == 0
    assert tree.is_chain
    assert tree.ancestors().shape == (*tree.depths().shape, 0) == (0, 0)


def test_children_finds_a_node_by_parent_and_token():
    assert branching().children() == {(-1, 5): 0, (0, 7): 1, (-1, 6): 2, (0, 8): 3, (2, 7): 4}


@given(tree=draft_trees(4, 12))
def test_along_the_tokens_of_a_path_and_others_are_its_nodes(tree):
    for node in range(len(tree)):
        nodes = tree.along([*tree.path(node).tolist(), 4])  # no node has the token 4
        assert nodes == np.flatnonzero(tree.ancestors()[node]).tolist()


def test_truncated_drops_deeper_nodes_and_keeps_the_others_linked():
    tree = branching().truncated(1)
    assert tree.tokens.tolist() == [5, 6]
    assert tree.parents.tolist() == [-1, -1]
    assert len(branching().truncated(0)) == 0
    assert branching().truncated(2).tokens.tolist() == branching().tokens.tolist()


def test_a_notebook_shows_the_nodes_under_their_parents():
    tree = DraftTree(tokens=[5, 6, 7], parents=[-1, -1, 0], probs=[0.6, 0.3, 0.5])
    assert tree._repr_html_() == "<pre>root\n  5 60 %\n    7 50 %\n  6 30 %</pre>"


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": [5, 7, 6, 8, 7], "parents": [-1, 0, -1, 0, 2]},
        {"tokens": np.array([5, 7, 6, 8, 7], np.uint16)},
        {"tokens": np.repeat(branching().tokens, 2)[::2]},
        {"parents": np.array([-1, 0, -1, 0, 2], np.int64)},
        {"probs": [1, 1, 1, 0, 0]},
    ],
)
def test_lists_and_other_numbers_are_converted(changes):
    tree = branching(**changes).checked(vocab_size=9)
    assert (tree.tokens.dtype, tree.parents.dtype) == (np.int64, np.int32)
    assert tree.probs.dtype == np.float32
    assert tree.children() == branching().children()
    assert tree.depths().tolist() == branching().depths().tolist()


# Which node is at fault, and how, is compared with a twin below.
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": np.array([5, 7, 6, 9, 7])}, "vocabulary of 9"),
        ({"tokens": np.array([5, 7, 6, 7, 7])}, "two siblings with the same token"),
        ({"tokens": np.array([5.0, 7, 6, 8, 7])}, "tokens must be a 1-D int64 array"),
        ({"tokens": [[5, 7, 6, 8, 7]]}, "tokens must be a 1-D int64 array"),
        ({"tokens": ["5"] * 5}, "tokens must be a 1-D int64 array"),
        ({"parents": np.array([-1.0, 0, -1, 0, 2])}, "parents must be a 1-D int32 array"),
        ({"parents": np.array([2**32 - 1, 0, -1, 0, 2])}, "parents has numbers that are no int32"),
        ({"parents": np.array([-1, 0, -1, 3, 2], np.int32)}, "earlier node's index"),
        ({"parents": np.array([-1, 0], np.int32)}, "parents has 2 entries for 5 tokens"),
        ({"probs": np.array([0.5, 0.6, 0.4, 0.1, 0.3], np.float32)}, "must not increase"),
        ({"probs": np.array([0.5, np.nan, 0.4, 0.1, 0.3], np.float32)}, r"must be in \[0, 1\]"),
    ],
)
def test_what_is_wrong_with_a_tree_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        branching(**changes).checked(vocab_size=9)


VOCAB_SIZE = 3


# --- arrays, and their twins


parents_lists = draft_trees(99, 12).map(lambda tree: tree.parents)


def path_to(parents, node):
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


@given(parents_lists)
def test_depths_and_ancestors_are_those_of_the_path(parents):
    depths, ancestors = tree_depths(parents), tree_ancestors(parents)
    for node in range(len(parents)):
        path = path_to(parents, node)
        assert depths[node] == len(path)
        assert np.flatnonzero(ancestors[node]).tolist() == sorted(path)


@given(parents_lists, st.randoms(use_true_random=False))
def test_best_path_has_the_largest_sum_of_probs(parents, random):
    probs = np.array([random.random() for _ in parents], np.float32)
    paths = [[], *(path_to(parents, node) for node in range(len(parents)))]
    sums = {tuple(path): probs[path].sum() for path in paths}
    best = tuple(best_path(parents, probs).tolist())
    assert sums[best] == pytest.approx(max(sums.values()))


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
