"""What a `DraftTree` tells of itself, and which trees it refuses."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given

from hf_refspec.drafting.tree import DraftTree
from tests.helpers.trees import draft_trees

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


def test_the_empty_tree_has_no_node_and_is_legal():
    tree = DraftTree.empty()
    assert len(tree) == 0
    assert tree.is_chain
    assert tree.depths().shape == (0,)
    assert tree.ancestors().shape == (0, 0)
    assert len(tree.best_chain()) == 0
    assert len(tree.checked(vocab_size=1)) == len(DraftTree([], [], []).checked(9)) == 0


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


def test_a_legal_tree_passes():
    tree = branching()
    checked = tree.checked(vocab_size=9)
    assert checked.tokens is tree.tokens


def test_a_tree_of_lists_is_one_of_arrays():
    tree = DraftTree(tokens=[5, 6, 7], parents=[-1, -1, 0], probs=[0.6, 0.3, 0.5])
    assert tree.depths().tolist() == [1, 1, 2] and tree.path(2).tolist() == [5, 7]
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": np.array([5, 7, 6, 9, 7])}, "vocabulary of 9"),
        ({"tokens": np.array([5, 7, 6, -1, 7])}, "vocabulary of 9"),
        ({"tokens": np.array([5, 7, 5, 8, 7])}, "two siblings with the same token"),
        ({"tokens": np.array([5, 7, 6, 7, 7])}, "two siblings with the same token"),
        ({"tokens": np.array([5.0, 7, 6, 8, 7])}, "tokens must be a 1-D int64 array"),
        ({"tokens": [[5, 7, 6, 8, 7]]}, "tokens must be a 1-D int64 array"),
        ({"tokens": ["5"] * 5}, "tokens must be a 1-D int64 array"),
        ({"parents": np.array([-1.0, 0, -1, 0, 2])}, "parents must be a 1-D int32 array"),
        ({"parents": np.array([-1, 0, -1, 3, 2], np.int32)}, "earlier node's index"),
        ({"parents": np.array([-1, 0, -2, 0, 2], np.int32)}, "earlier node's index"),
        ({"parents": np.array([-1, 0], np.int32)}, "parents has 2 entries for 5 tokens"),
        ({"probs": np.array([0.5, 0.6, 0.4, 0.1, 0.3], np.float32)}, "must not increase"),
        ({"probs": np.array([1.5, 0.6, 0.4, 0.1, 0.3], np.float32)}, r"must be in \[0, 1\]"),
        ({"probs": np.array([0.5, np.nan, 0.4, 0.1, 0.3], np.float32)}, r"must be in \[0, 1\]"),
    ],
)
def test_what_is_wrong_with_a_tree_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        branching(**changes).checked(vocab_size=9)
