"""Best-first growth: the one loop by which all draft trees grow.

A *proposal* proposes the next token at a node: a place in a text that agrees with the path to the
node (llma.py), a continuation of a match in a datastore (rest_trie.py), an entry of a
recycling table (recycling.py), a node of another tree (drafting/tree.py). Each of these files
has an `expand_...` function, which returns the children of a node: it divides the node's proposals
among them, one child for each token. The most probable waiting child joins the tree, until the
budget is used up. As probabilities do not rise from parent to child, these are the most probable
nodes of all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numba import njit

# A draft tree: tokens (int64), parents (int32, -1 is the root) and probabilities (float32), each of
# shape (T,), parents first; and as numba's type.
TreeArrays: TypeAlias = tuple[np.ndarray, np.ndarray, np.ndarray]
TREE_TYPE = "Tuple((int64[::1], int32[::1], float32[::1]))"

# Compiled without numba's reference counts, which would change for every array at every node. Such
# code may not allocate.
njit_no_alloc = njit(_nrt=False)


class Growth(NamedTuple):
    """A growing tree and its proposals, which are indices of the arrays.

    The proposals of a node are a linked list, the first of which identifies a waiting node."""

    tokens: np.ndarray  # int64, the tree so far
    parents: np.ndarray  # int32
    probs: np.ndarray  # float32
    following: np.ndarray  # int32, the next proposal of the same node, -1 after the last
    proposed: np.ndarray  # int32, the token of each proposal, -1 for none
    weights: np.ndarray  # float64, of each proposal; of a node that waits, its probability
    parent_of: np.ndarray  # int32, of a node that waits
    depth_of: np.ndarray  # int32
    children: np.ndarray  # int32, the first proposals of a node's children
    heap: np.ndarray  # int32, the nodes that wait, the most probable on top
    # From a token to the child that has it: a hash table, whose entries are void at another node.
    # Its key is random: texts of tokens that collide would make drafting slow.
    slots: np.ndarray  # int32
    slot_nodes: np.ndarray  # int32
    key: int  # odd


def grower(expand: Callable[..., int]) -> Callable[..., Any]:
    """Compiles the growth of draft trees by one `expand` function.

    `expand(found, growth, first, node, depth, prob)`, a compiled function, sets `growth.proposed`
    and `growth.weights` of the proposals at `node` (-1 is the root), beginning with `first`, calls
    `divide`, turns the children's weights into probabilities, and returns how many children there
    are. `found` is the named tuple of arrays and numbers that it reads.

    Returns `grow(found, count, capacity, widest, budget, chain)`, which grows a draft tree, best
    node first, or a single path (`chain`), at each node to the most probable child. The root has
    the first `count` proposals, and there can be `capacity` of them, at one node the `widest`."""

    @njit_no_alloc
    def fill(found, growth, chain):
        children = growth.children
        heap = growth.heap
        weights = growth.weights
        waiting = 0  # nodes in the heap
        size = 0
        # The node to expand; first the root.
        first = 0
        node = -1
        depth = 0
        prob = 1.0
        while size < len(growth.tokens):
            for i in range(expand(found, growth, first, node, depth, prob)):
                growth.parent_of[children[i]] = node
                growth.depth_of[children[i]] = depth + 1
                heap_push(heap, waiting, weights, children[i])
                waiting += 1
            if waiting == 0:
                break
            first = heap_pop(heap, waiting, weights)
            waiting = 0 if chain else waiting - 1
            node = size
            parent = growth.parent_of[first]
            depth = growth.depth_of[first]
            # Children that add up to their parent's probability can exceed it by a rounding.
            prob = min(weights[first], growth.probs[parent] if parent >= 0 else 1.0)
            growth.tokens[node] = growth.proposed[first]
            growth.parents[node] = parent
            growth.probs[node] = prob
            size += 1
        return size

    @njit
    def grow(found, count, capacity, widest, budget, chain):
        if count == 0:
            return no_tree()
        growth = _empty_growth(count, capacity, widest, budget)
        size = fill(found, growth, chain)
        return growth.tokens[:size], growth.parents[:size], growth.probs[:size]

    return grow


@njit
def _empty_growth(count, capacity, widest, budget):
    # Memory that nobody writes costs nothing: only the slots are filled.
    following = np.empty(capacity, dtype=np.int32)
    for proposal in range(count):
        following[proposal] = proposal + 1 if proposal + 1 < count else -1
    slot_count = 1
    while slot_count < 2 * widest:
        slot_count *= 2
    return Growth(
        np.empty(budget, dtype=np.int64),
        np.empty(budget, dtype=np.int32),
        np.empty(budget, dtype=np.float32),
        following,
        np.empty(capacity, dtype=np.int32),
        np.empty(capacity, dtype=np.float64),
        np.empty(capacity, dtype=np.int32),
        np.empty(capacity, dtype=np.int32),
        np.empty(capacity, dtype=np.int32),
        np.empty(capacity, dtype=np.int32),
        np.empty(slot_count, dtype=np.int32),
        np.full(slot_count, -2, dtype=np.int32),
        2 * np.random.randint(1 << 62) + 1,  # numba's own generator, which nobody seeds
    )


@njit
def no_tree():
    """The tree without nodes: three arrays of shape `(0,)`."""
    return np.empty(0, np.int64), np.empty(0, np.int32), np.empty(0, np.float32)


@njit_no_alloc
def divide(growth, first, node):
    """Divides a node's proposals among its children, one for each token; returns their number.

    The weight of a child is the sum of the weights of all that propose it."""
    following = growth.following
    proposed = growth.proposed
    weights = growth.weights
    slots = growth.slots
    slot_nodes = growth.slot_nodes
    count = 0
    proposal = first
    while proposal >= 0:
        next_proposal = following[proposal]
        token = proposed[proposal]
        if token >= 0:
            slot = ((np.int64(token) * growth.key) >> 32) & (len(slots) - 1)
            while slot_nodes[slot] == node and proposed[slots[slot]] != token:
                slot = (slot + 1) & (len(slots) - 1)
            if slot_nodes[slot] != node:
                slot_nodes[slot] = node
                slots[slot] = proposal
                following[proposal] = -1
                growth.children[count] = proposal
                count += 1
            else:
                child = slots[slot]
                weights[child] += weights[proposal]
                following[proposal] = following[child]
                following[child] = proposal
        proposal = next_proposal
    return count


@njit_no_alloc
def heap_push(heap, size, keys, item):
    """Adds `item` to a heap (C,) of `size` items with the largest `keys[item]` on top."""
    hole = size
    while hole > 0 and keys[heap[(hole - 1) // 2]] < keys[item]:
        heap[hole] = heap[(hole - 1) // 2]
        hole = (hole - 1) // 2
    heap[hole] = item


@njit_no_alloc
def heap_pop(heap, size, keys):
    """Removes the top of a heap (C,) of `size` items and returns it."""
    top = heap[0]
    moved = heap[size - 1]
    hole = 0
    child = 1
    while child < size - 1:
        if child + 1 < size - 1 and keys[heap[child + 1]] > keys[heap[child]]:
            child += 1
        if keys[heap[child]] <= keys[moved]:
            break
        heap[hole] = heap[child]
        hole = child
        child = 2 * hole + 1
    heap[hole] = moved
    return top
