"""How a node's proposals are divided among its children."""

from __future__ import annotations

import numpy as np

from hf_refspec.index.best_first import Growth, divide

SLOTS, COUNT = 1 << 12, 500


class Counting:
    """The nodes that slots belong to, and how often one is looked up."""

    def __init__(self) -> None:
        self.nodes, self.number = np.full(SLOTS, -2, np.int32), 0

    def __getitem__(self, slot: int) -> int:
        self.number += 1
        return int(self.nodes[slot])

    def __setitem__(self, slot: int, node: int) -> None:
        self.nodes[slot] = node


def looked_up(tokens: np.ndarray, key: int) -> int:
    """How many slots are looked at to divide tokens that are all different."""
    following = np.append(np.arange(1, len(tokens)), -1)
    children, slots, slot_nodes = np.empty(COUNT, np.int32), np.empty(SLOTS, np.int32), Counting()
    unused: list = [None] * 8
    tree, weights = unused[:3], np.ones(len(tokens))
    growth = Growth(
        *tree, following, tokens, weights, *unused[:2], children, None, slots, slot_nodes, key
    )
    with np.errstate(over="ignore"):
        assert divide.py_func(growth, 0, -1) == len(tokens)
    return slot_nodes.number


def test_tokens_that_collide_for_one_key_do_not_for_another():
    tokens, key = np.arange(1 << 18), (1 << 61) + 0x2545F4914F6CDD1D
    colliding = tokens[((tokens * key) >> 32) & (SLOTS - 1) < COUNT // 60][:COUNT]
    assert len(colliding) == COUNT
    assert looked_up(colliding, key) > 100 * COUNT
    assert looked_up(colliding, (1 << 60) + 0x1B873593CC9E2D51) < 10 * COUNT
