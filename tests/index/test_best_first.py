"""How a node's proposals are divided among its children."""

import numpy as np

from hf_refspec.index.best_first import Growth, divide

SLOTS, COUNT = 1 << 12, 500


def longest_search(tokens: np.ndarray, key: int) -> int:
    """The most slots that are looked at for one of some tokens, which are all different."""
    following = np.append(np.arange(1, len(tokens)), -1)
    children, slots = np.empty(COUNT, np.int32), np.zeros(SLOTS, np.int32)
    slot_nodes, unused = np.full(SLOTS, -2, np.int32), [None] * 8
    tree, weights = unused[:3], np.ones(len(tokens))
    growth = Growth(
        *tree, following, tokens, weights, *unused[:2], children, None, slots, slot_nodes, key
    )
    with np.errstate(over="ignore"):
        assert divide.py_func(growth, 0, -1) == len(tokens)
    taken = np.flatnonzero(slot_nodes == -1)
    homes = (tokens[slots[taken]] * key) >> 32
    return int(((taken - homes) % SLOTS).max()) + 1


def test_tokens_that_collide_for_one_key_do_not_for_another():
    tokens, key = np.arange(1 << 18), (1 << 61) + 0x2545F4914F6CDD1D
    colliding = tokens[((tokens * key) >> 32) & (SLOTS - 1) < COUNT // 60][:COUNT]
    assert len(colliding) == COUNT
    assert longest_search(colliding, key) > 400
    assert longest_search(colliding, (1 << 60) + 0x1B873593CC9E2D51) < 40
