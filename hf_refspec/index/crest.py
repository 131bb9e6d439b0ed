"""CREST's table: the commonest n-grams of a datastore, each with a stored draft tree.

"CREST: Effectively Compacting a Datastore For Retrieval-Based Speculative Decoding" (arXiv
2408.04678): what REST (rest_trie.py) grows at every draft is grown once and looked up in O(1). Here
it is an open-addressing hash table in plain arrays, which can be mapped from a file.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numba import njit

from .draft_tree import TREE_TYPE, TreeArrays
from .kernels import kernel, kernel_type

# A parent is one byte; this one is the root.
ROOT_BYTE = 255
LARGEST_TREE = 255
# A probability is a power of 1/2 in one byte: each step makes it 4 % smaller, the last is 2e-5.
STEPS_PER_HALF = 16
# With a quarter of the slots free, at most hundreds in a row are taken; in a malicious file it may
# be all of them.
MOST_PROBES = 1 << 14
_DAMAGED = (
    "the datastore is damaged: its n-gram table points outside of itself; "
    "Datastore.verify() tells which file it is"
)


class NgramTable(NamedTuple):
    """n-grams and their draft trees in plain arrays, perhaps mapped from an unchecked file.

    `keys` holds the tokens of each n-gram, filled up with the largest number of the type, and
    `slots` by hash the n-gram's index + 1; 0 is free, and a collision moves on to the next slot.
    """

    keys: np.ndarray  # uint16 or uint32, (entries * max_ngram,)
    slots: np.ndarray  # uint32, (a power of two,)
    starts: np.ndarray  # uint32, (entries + 1,), where each tree begins, and where the last ends
    node_tokens: np.ndarray  # as keys, (nodes,)
    node_parents: np.ndarray  # uint8, (nodes,), indices in the tree
    node_probs: np.ndarray  # uint8, (nodes,): prob = 2 ** -(byte / 16)
    max_ngram: int
    vocab_size: int  # all tokens are below it

    def tree(self, context: np.ndarray, min_match: int, budget: int) -> TreeArrays:
        """Looks up the draft tree of the longest n-gram that a context (int32) ends with."""
        return look_up(self, context, min_match, min(budget, LARGEST_TREE))


for _dtype in ("uint16", "uint32"):
    _tokens = f"{_dtype}[::1]"
    kernel_type(
        f"NgramTable_{_dtype}",
        NgramTable,
        f"{_tokens}, uint32[::1], uint32[::1], {_tokens}, uint8[::1], uint8[::1], int64, int64",
    )


def build_table(
    ngrams: Sequence[np.ndarray], trees: Sequence[TreeArrays], dtype: np.dtype, vocab_size: int
) -> NgramTable:
    """Builds a table of n-grams, of each order from 1 on (int32, `(count, n)`), and the tree of
    each in turn, of at most 255 nodes."""
    max_ngram = len(ngrams)
    entries = sum(len(order) for order in ngrams)
    keys = np.full((entries, max_ngram), np.iinfo(dtype).max, dtype=dtype)
    end = 0
    for n, order in enumerate(ngrams, start=1):
        keys[end : end + len(order), :n] = order
        end += len(order)
    slots = np.zeros(_slot_count(entries), dtype=np.uint32)
    fill_slots(keys.reshape(-1), max_ngram, slots)
    sizes = [len(tokens) for tokens, _, _ in trees]
    starts = np.cumsum([0, *sizes], dtype=np.uint32)
    tokens, parents, probs = (
        [np.concatenate(parts) for parts in zip(*trees, strict=True)]
        if trees
        else [np.empty(0)] * 3
    )
    steps = np.round(-STEPS_PER_HALF * np.log2(np.maximum(probs, 1e-9)))
    return NgramTable(
        keys=keys.reshape(-1),
        slots=slots,
        starts=starts,
        node_tokens=tokens.astype(dtype),
        node_parents=np.where(parents < 0, ROOT_BYTE, parents).astype(np.uint8),
        node_probs=np.clip(steps, 0, 255).astype(np.uint8),
        max_ngram=max_ngram,
        vocab_size=vocab_size,
    )


def table_bytes(entries: int, nodes: int, max_ngram: int, dtype: np.dtype) -> int:
    """The size of the arrays of a table, from its numbers of n-grams and nodes."""
    token = np.dtype(dtype).itemsize
    slots = 4 * _slot_count(entries)
    return entries * max_ngram * token + slots + 4 * (entries + 1) + nodes * (token + 2)


def _slot_count(entries: int) -> int:
    """A power of two that leaves a quarter of the slots or more free."""
    count = 1
    while 3 * count < 4 * entries or count == entries:
        count *= 2
    return count


@njit
def _hash(ngram):
    """A number whose low bits depend on all bits of all tokens (FNV-1a, then a final mix)."""
    mixed = np.uint64(14695981039346656037)
    for token in ngram:
        mixed = (mixed ^ np.uint64(token)) * np.uint64(1099511628211)
    return mixed ^ (mixed >> np.uint64(29))


@kernel(
    "void(uint16[::1], int64, uint32[::1])", "void(uint32[::1], int64, uint32[::1])", drafts=False
)
def fill_slots(keys, max_ngram, slots):
    """Enters all n-grams of `keys`, as in an `NgramTable`, into free `slots`."""
    filler = np.iinfo(keys.dtype).max
    for entry in range(len(keys) // max_ngram):
        key = keys[entry * max_ngram : (entry + 1) * max_ngram]
        length = max_ngram
        while key[length - 1] == filler:
            length -= 1
        slot = np.int64(_hash(key[:length]) & np.uint64(len(slots) - 1))
        while slots[slot] > 0:
            slot = (slot + 1) & (len(slots) - 1)
        slots[slot] = entry + 1


@njit
def _find(table, ngram):
    """The index of an n-gram, -1 if it is not there."""
    keys = table.keys
    slots = table.slots
    filler = np.iinfo(keys.dtype).max
    entries = len(keys) // table.max_ngram
    slot = np.int64(_hash(ngram) & np.uint64(len(slots) - 1))
    for _ in range(min(len(slots), MOST_PROBES)):
        entry = np.int64(slots[slot]) - 1
        if entry < 0:
            return -1
        if entry >= entries:
            raise ValueError(_DAMAGED)
        same = True
        for i in range(table.max_ngram):
            wanted = ngram[i] if i < len(ngram) else filler
            if keys[entry * table.max_ngram + i] != wanted:
                same = False
                break
        if same:
            return entry
        slot = (slot + 1) & (len(slots) - 1)
    return -1


_LOOK_UP = TREE_TYPE + "(NgramTable_{}, int32[::1], int64, int64)"


@kernel(_LOOK_UP.format("uint16"), _LOOK_UP.format("uint32"))
def look_up(table, context, min_match, budget):
    """The tree of the longest n-gram that `context` ends with, see `NgramTable.tree`."""
    tokens = np.empty(budget, dtype=np.int64)
    parents = np.empty(budget, dtype=np.int32)
    probs = np.empty(budget, dtype=np.float32)
    entry = -1
    length = min(table.max_ngram, len(context))
    while entry < 0 and length >= min_match:
        entry = _find(table, context[len(context) - length :])
        length -= 1
    if entry < 0:
        return tokens[:0], parents[:0], probs[:0]
    start = np.int64(table.starts[entry])
    end = np.int64(table.starts[entry + 1])
    if not start <= end <= len(table.node_tokens):
        raise ValueError(_DAMAGED)
    size = min(end - start, budget)
    for node in range(size):
        token = table.node_tokens[start + node]
        parent = np.int64(table.node_parents[start + node])
        parent = -1 if parent == ROOT_BYTE else parent
        if parent >= node or token >= table.vocab_size:
            raise ValueError(_DAMAGED)
        tokens[node], parents[node] = token, parent
        for other in range(node):
            if parents[other] == parent and tokens[other] == tokens[node]:
                raise ValueError(_DAMAGED)
        prob = 0.5 ** (table.node_probs[start + node] / STEPS_PER_HALF)
        probs[node] = min(prob, probs[parent] if parent >= 0 else 1.0)
    return tokens[:size], parents[:size], probs[:size]
