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

from typing import NamedTuple

import numpy as np
from numba import njit


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


@njit
def grow_best_first(expand, found, growth, chain, tokens, parents, probs):
    """Grows a draft tree, best node first.

    Args:
        expand: A compiled function `expand(found, growth, first, node, depth, prob, tokens,
            parents)` that sets the tokens and weights of the proposals at `node` (-1 is the root),
            beginning with `first`, calls `divide`, makes probabilities of the children's weights
            and returns the number of children. `tokens` and `parents` are the tree so far.
        found: Whatever `expand` needs beside them.
        growth: A `Growth` with the root's proposals, at least one.
        chain: Whether to grow a single path, at each node to the most probable child.
        tokens, parents, probs: The tree is written here; their length is the budget.

    Returns:
        The number of nodes.
    """
    size, waiting = 0, 0
    first, node, depth, prob = 0, -1, 0, 1.0
    while size < len(tokens):
        for i in range(expand(found, growth, first, node, depth, prob, tokens, parents)):
            child = growth.children[i]
            growth.parents[child], growth.depths[child] = node, depth + 1
            heap_push(growth.heap, waiting, growth.probs, child)
            waiting += 1
        if waiting == 0:
            break
        first = heap_pop(growth.heap, waiting, growth.probs)
        waiting = 0 if chain else waiting - 1
        node, parent, depth = size, growth.parents[first], growth.depths[first]
        # What should add up to the parent's probability can pass it by a rounding.
        prob = min(growth.probs[first], probs[parent] if parent >= 0 else 1.0)
        tokens[node], parents[node], probs[node] = growth.tokens[first], parent, prob
        size += 1
    return size


@njit
def divide(growth, first, node):
    """Divides a node's proposals among its children, one for each token; returns their number.

    `growth.children` has the first proposal of each child, and `growth.probs` at that proposal the
    sum of the weights of all that propose the child.
    """
    count, proposal = 0, first
    while proposal >= 0:
        next_proposal = growth.following[proposal]
        token = growth.tokens[proposal]
        if token >= 0:
            slot = (token * 40503) & (len(growth.slots) - 1)
            while (
                growth.slot_nodes[slot] == node and growth.tokens[growth.slots[slot]] != token
            ):
                slot = (slot + 1) & (len(growth.slots) - 1)
            if growth.slot_nodes[slot] != node:
                growth.slot_nodes[slot], growth.slots[slot] = node, proposal
                growth.following[proposal] = -1
                growth.children[count] = proposal
                count += 1
            else:
                child = growth.slots[slot]
                growth.probs[child] += growth.probs[proposal]
                growth.following[proposal] = growth.following[child]
                growth.following[child] = proposal
        proposal = next_proposal
    return count


@njit
def heap_push(heap, size, keys, item):
    """Adds `item` to a heap of `size` items with the largest `keys[item]` on top."""
    hole = size
    while hole > 0 and keys[heap[(hole - 1) // 2]] < keys[item]:
        heap[hole] = heap[(hole - 1) // 2]
        hole = (hole - 1) // 2
    heap[hole] = item


@njit
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
