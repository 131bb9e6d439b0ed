"""Best-first growth: the one loop by which draft trees grow out of what was found in texts.

What proposes the next token at a node is called a *proposal*: a place in a text that agrees with
the path to the node (copy_tree.py), or what followed a match in a datastore (rest_trie.py). A
node's proposals are divided among its children, one child for each token, and the most probable
child that waits joins the tree, until the budget is used up. As probabilities do not rise from
parent to child, these are the most probable nodes of the whole trie of proposals.
"""

# mypy: disallow-untyped-defs=False
# Kernels compile what stands here for their own types.

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numba import njit
from numba.extending import overload


class Growth(NamedTuple):
    """The proposals of a growing tree, in arrays that they are the indices of.

    The proposals of a node are a linked list. A node that waits to join the tree is known by its
    first proposal, and `probs[first]`, `parents[first]` and `depths[first]` are its own.
    """

    following: np.ndarray  # int32: the node's next proposal, -1 behind the last
    tokens: np.ndarray  # int32: what is proposed, -1 for nothing
    probs: np.ndarray  # float64: the proposal's weight, the node's probability once it waits
    parents: np.ndarray  # int32
    depths: np.ndarray  # int32
    children: np.ndarray  # int32: the first proposals of the node's children, see `divide`
    heap: np.ndarray  # int32: the nodes that wait, the most probable on top
    # From a token to the child that has it: a hash table, whose entries are void at another node.
    slots: np.ndarray  # int32
    slot_nodes: np.ndarray  # int32


@njit
def new_growth(count, capacity):
    """Room for `capacity` proposals, of which the first `count` are the root's."""
    following = np.empty(capacity, dtype=np.int32)
    for i in range(count):
        following[i] = i + 1 if i + 1 < count else -1
    slot_count = 1
    while slot_count < 2 * capacity:
        slot_count *= 2
    return Growth(
        following,
        np.empty(capacity, dtype=np.int32),
        np.empty(capacity, dtype=np.float64),
        np.empty(capacity, dtype=np.int32),
        np.empty(capacity, dtype=np.int32),
        np.empty(capacity, dtype=np.int32),
        np.empty(capacity, dtype=np.int32),
        np.empty(slot_count, dtype=np.int32),
        np.full(slot_count, -2, dtype=np.int32),
    )


# Compiled without numba's reference counts, which every array would be counted by at every node:
# what is compiled so may not allocate.
uncounted = njit(_nrt=False)


def expand(found, growth, first, node, depth, prob, tokens, parents):
    """Finds the children of a node; what a tree grows out of has its own, see `expands`.

    It sets the tokens and weights of the node's proposals, calls `divide`, and makes probabilities
    of the children's weights.

    Args:
        found: What was found in texts, a named tuple of arrays and numbers.
        growth: A `Growth`.
        first: The node's first proposal.
        node: Its index in the tree, -1 for the root.
        depth, prob: The node's.
        tokens, parents: The tree so far.

    Returns:
        The number of children.
    """
    raise NotImplementedError  # Only kernels grow trees.


def expands(kind: type) -> Callable[[Callable], Callable]:
    """Makes a function the `expand` of all that is `found` as a named tuple of this type."""

    def register(function):
        @overload(expand, jit_options={"_nrt": False})
        def chosen(found, growth, first, node, depth, prob, tokens, parents):
            return function if getattr(found, "instance_class", None) is kind else None

        return function

    return register


@uncounted
def grow_best_first(found, growth, chain, tokens, parents, probs):
    """Grows a draft tree, best node first.

    Args:
        found: What the tree grows out of, see `expand`.
        growth: A `Growth` with the root's proposals, at least one.
        chain: Whether to grow a single path, at each node to the most probable child.
        tokens, parents, probs: The tree is written here; their length is the budget.

    Returns:
        The number of nodes.
    """
    children, heap, waiting = growth.children, growth.heap, 0
    its_token, its_prob = growth.tokens, growth.probs
    its_parent, its_depth = growth.parents, growth.depths
    size, first, node, depth, prob = 0, 0, -1, 0, 1.0
    while size < len(tokens):
        for i in range(expand(found, growth, first, node, depth, prob, tokens, parents)):
            its_parent[children[i]], its_depth[children[i]] = node, depth + 1
            heap_push(heap, waiting, its_prob, children[i])
            waiting += 1
        if waiting == 0:
            break
        first = heap_pop(heap, waiting, its_prob)
        waiting = 0 if chain else waiting - 1
        node, parent, depth = size, its_parent[first], its_depth[first]
        # What should add up to the parent's probability can pass it by a rounding.
        prob = min(its_prob[first], probs[parent] if parent >= 0 else 1.0)
        tokens[node], parents[node], probs[node] = its_token[first], parent, prob
        size += 1
    return size


@uncounted
def divide(growth, first, node):
    """Divides a node's proposals among its children, one for each token; returns their number.

    `growth.children` has the first proposal of each child, and `growth.probs` at that proposal the
    sum of the weights of all that propose the child.
    """
    following, tokens, probs = growth.following, growth.tokens, growth.probs
    slots, slot_nodes, children = growth.slots, growth.slot_nodes, growth.children
    count, proposal = 0, first
    while proposal >= 0:
        next_proposal = following[proposal]
        token = tokens[proposal]
        if token >= 0:
            slot = (token * 40503) & (len(slots) - 1)
            while slot_nodes[slot] == node and tokens[slots[slot]] != token:
                slot = (slot + 1) & (len(slots) - 1)
            if slot_nodes[slot] != node:
                slot_nodes[slot], slots[slot] = node, proposal
                following[proposal] = -1
                children[count] = proposal
                count += 1
            else:
                child = slots[slot]
                probs[child] += probs[proposal]
                following[proposal] = following[child]
                following[child] = proposal
        proposal = next_proposal
    return count


@uncounted
def heap_push(heap, size, keys, item):
    """Adds `item` to a heap of `size` items with the largest `keys[item]` on top."""
    hole = size
    while hole > 0 and keys[heap[(hole - 1) // 2]] < keys[item]:
        heap[hole] = heap[(hole - 1) // 2]
        hole = (hole - 1) // 2
    heap[hole] = item


@uncounted
def heap_pop(heap, size, keys):
    """Takes the top off a heap of `size` items and returns it."""
    top, moved = heap[0], heap[size - 1]
    hole, child = 0, 1
    while child < size - 1:
        if child + 1 < size - 1 and keys[heap[child + 1]] > keys[heap[child]]:
            child += 1
        if keys[heap[child]] <= keys[moved]:
            break
        heap[hole] = heap[child]
        hole, child = child, 2 * child + 1
    heap[hole] = moved
    return top
