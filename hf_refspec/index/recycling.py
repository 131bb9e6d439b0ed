"""The table of Token Recycling: what the target model expected after the last 1 to n tokens.

An entry is a context of at most `MOST_CONTEXT` tokens, with the target's k best next tokens and
their probabilities when it was last verified. Entries are found by open addressing, keep their
whole context, and are linked by age: one that is learned again becomes the newest, and a full table
drops its oldest.

The hash has a random key, which is never stored: no table or text can be written whose contexts
collide. The content of a table does not depend on it.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import os
from typing import NamedTuple

import numpy as np

from .best_first import uncounted
from .kernels import kernel, kernel_type

MOST_CONTEXT = 3
# How many of the commonest tokens are kept in order.
COMMONEST = 8
# The numbers of `state`: how many entries there are, the oldest and the newest of them, and the
# first of the `1 + MOST_CONTEXT` that are the key of the hash.
COUNT, OLDEST, NEWEST, KEY = 0, 1, 2, 3


class Table(NamedTuple):
    """The arrays of a table with room for C entries.

    A context has its last token first, the next tokens are best first; -1 is no token.
    """

    contexts: np.ndarray  # int32, (C, MOST_CONTEXT)
    tokens: np.ndarray  # int32, (C, k)
    probs: np.ndarray  # float32, (C, k)
    older: np.ndarray  # int32, (C,), the entry before each by age; -1 at the end
    newer: np.ndarray  # int32, (C,)
    slots: np.ndarray  # int32, a hash table of entries, each plus 1; 0 is free
    state: np.ndarray  # int64, (4 + MOST_CONTEXT,), see `COUNT`


_ROWS, _NUMBERS = ["int32[:, ::1]", "int32[:, ::1]", "float32[:, ::1]"], ["int32[::1]"] * 3
kernel_type("Table", Table, *_ROWS, *_NUMBERS, "int64[::1]")


def new_table(capacity: int, top_k: int) -> Table:
    """An empty table. It takes no memory before entries are learned: its pages are untouched."""
    return Table(
        np.zeros((capacity, MOST_CONTEXT), dtype=np.int32),
        np.zeros((capacity, top_k), dtype=np.int32),
        np.zeros((capacity, top_k), dtype=np.float32),
        np.zeros(capacity, dtype=np.int32),
        np.zeros(capacity, dtype=np.int32),
        np.zeros(1 << (2 * capacity - 1).bit_length(), dtype=np.int32),
        np.array([0, -1, -1, *np.frombuffer(os.urandom(8 * (1 + MOST_CONTEXT)), np.int64)]),
    )


@uncounted
def find(table, context):
    """The entry of a context, -1 if there is none.

    The context has its last token first, and -1 for each token that it lacks.
    """
    slots = table.slots
    slot = _home(table, context)
    while slots[slot] != 0:
        entry = slots[slot] - 1
        held = table.contexts[entry]
        if held[0] == context[0] and held[1] == context[1] and held[2] == context[2]:
            return entry
        slot = (slot + 1) & (len(slots) - 1)
    return -1


@uncounted
def _home(table, context):
    """The slot at which the search for a context begins: two contexts share it by chance alone
    (multiply-shift, Dietzfelbinger 1996)."""
    mixed, key = table.state[KEY], table.state
    mixed += key[KEY + 1] * context[0] + key[KEY + 2] * context[1] + key[KEY + 3] * context[2]
    return (mixed >> 32) & (len(table.slots) - 1)


@kernel(
    "void(Table, int64, int64, int32[::1], int64[::1], int32[::1], int32[:, ::1], float32[:, ::1])"
)
def learn(table, longest, vocab_size, before, tokens, parents, best_tokens, best_probs):
    """Enters what the target expects after a text and after each node of a tree below it.

    It replaces entries of the same context, leaves out invalid probabilities, and skips nodes whose
    best one is invalid.

    Args:
        table: Changed in place.
        longest: n, the longest contexts.
        vocab_size: Tokens are below it.
        before: The last tokens of the text, as many as there are up to MOST_CONTEXT.
        tokens, parents: The T nodes, parents first; -1 is the text.
        best_tokens, best_probs: The best next tokens, (1 + T, k): after the text, and each node.
    """
    path = np.full((1 + len(parents), MOST_CONTEXT), -1, dtype=np.int32)
    for i in range(len(before)):
        path[0, i] = before[len(before) - 1 - i]
    for node in range(len(parents)):
        path[1 + node, 0] = tokens[node]
        for i in range(1, MOST_CONTEXT):
            path[1 + node, i] = path[1 + parents[node], i - 1]
    for node in range(len(path)):
        if not best_probs[node, 0] > 0:
            continue
        known = path[node]
        for length in range(1, longest + 1):
            if known[length - 1] < 0:
                break
            second = known[1] if length > 1 else np.int32(-1)
            third = known[2] if length > 2 else np.int32(-1)
            entry = _entry(table, (known[0], second, third))
            _write(table, entry, best_tokens[node], best_probs[node], vocab_size)


@uncounted
def _write(table, entry, best_tokens, best_probs, vocab_size):
    tokens, probs = table.tokens[entry], table.probs[entry]
    for i in range(len(tokens)):
        usable = i < len(best_tokens) and 0 <= best_tokens[i] < vocab_size
        if usable and 0 < best_probs[i] <= 1:  # not NaN
            tokens[i], probs[i] = best_tokens[i], best_probs[i]
        else:
            tokens[i], probs[i] = -1, 0


@uncounted
def _entry(table, context):
    """Finds or creates the entry of a context, and makes it the newest."""
    entry = find(table, context)
    if entry >= 0:
        _unlink(table, entry)
    else:
        if table.state[COUNT] < len(table.contexts):
            entry = np.int64(table.state[COUNT])
            table.state[COUNT] += 1
        else:
            entry = np.int64(table.state[OLDEST])
            _unlink(table, entry)
            _forget(table, entry)
        for i in range(MOST_CONTEXT):
            table.contexts[entry, i] = context[i]
        slot = _home(table, context)
        while table.slots[slot] != 0:
            slot = (slot + 1) & (len(table.slots) - 1)
        table.slots[slot] = entry + 1
    newest = table.state[NEWEST]
    table.older[entry], table.newer[entry] = newest, -1
    if newest >= 0:
        table.newer[newest] = entry
    else:
        table.state[OLDEST] = entry
    table.state[NEWEST] = entry
    return entry


@uncounted
def _unlink(table, entry):
    """Removes an entry from the list by age."""
    before, after = table.older[entry], table.newer[entry]
    if before >= 0:
        table.newer[before] = after
    else:
        table.state[OLDEST] = after
    if after >= 0:
        table.older[after] = before
    else:
        table.state[NEWEST] = before


@uncounted
def _forget(table, entry):
    """Removes an entry from the hash table, and moves those back that it had displaced."""
    contexts, slots = table.contexts, table.slots
    mask = len(slots) - 1
    hole = _home(table, contexts[entry])
    while slots[hole] != entry + 1:
        hole = (hole + 1) & mask
    slot = hole
    while True:
        slot = (slot + 1) & mask
        if slots[slot] == 0:
            break
        home = _home(table, contexts[slots[slot] - 1])
        if ((slot - home) & mask) >= ((slot - hole) & mask):
            slots[hole] = slots[slot]
            hole = slot
    slots[hole] = 0


@kernel("void(Table, int32[:, ::1], int32[:, ::1], float32[:, ::1])")
def enter(table, contexts, tokens, probs):
    """Enters what another table held, (C, MOST_CONTEXT) and (C, k), the oldest first."""
    for i in range(len(contexts)):
        context = contexts[i, 0], contexts[i, 1], contexts[i, 2]
        _write(table, _entry(table, context), tokens[i], probs[i], 1 << 31)


@kernel("int32[::1](Table)")
def by_age(table):
    """All entries, the oldest first."""
    entries = np.empty(table.state[COUNT], dtype=np.int32)
    entry = table.state[OLDEST]
    for i in range(len(entries)):
        entries[i] = entry
        entry = table.newer[entry]
    return entries


@kernel("void(float32[::1], int32[::1], int64[::1])")
def count_tokens(counts, commonest, tokens):
    """Counts tokens, and keeps the commonest in order, -1 for none."""
    for token in tokens:
        counts[token] += 1
        i = 0
        while i < len(commonest) - 1 and commonest[i] >= 0 and commonest[i] != token:
            i += 1
        if commonest[i] >= 0 and counts[commonest[i]] > counts[token]:
            continue
        while i > 0 and counts[commonest[i - 1]] < counts[token]:
            commonest[i] = commonest[i - 1]
            i -= 1
        commonest[i] = token
