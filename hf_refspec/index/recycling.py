"""The table of Token Recycling: the target model's best next tokens after the last 1 to n tokens.

An entry is a context of at most `MOST_CONTEXT` tokens, with the target's k best next tokens and
their probabilities when it was last verified. Entries are found by open addressing, and keep their
whole context and their age. A full table gives up an eighth of its entries, the oldest.

The hash has a random key, which is never stored: no table or text can be written whose contexts
collide. The content of a table does not depend on it.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import os
from typing import NamedTuple

import numpy as np

from ..kernels.kernel import kernel, kernel_type
from .best_first import uncounted

MOST_CONTEXT = 3
# The most next tokens of an entry, and entries of a table. Memory is set aside for all of them.
MOST_NEXT = 256
MOST_ENTRIES = 1 << 24
# How many of the commonest tokens are kept in order.
COMMONEST = 8
# The numbers of `state`: how many entries there are, the age of the newest, and the first of the
# `1 + MOST_CONTEXT` that are the key of the hash.
COUNT = 0
NEWEST = 1
KEY = 2


class Table(NamedTuple):
    """The arrays of a table with room for C entries.

    A context has its last token first, the next tokens are best first; -1 marks a missing token.
    """

    contexts: np.ndarray  # int32, (C, MOST_CONTEXT)
    tokens: np.ndarray  # int32, (C, k)
    probs: np.ndarray  # float32, (C, k)
    ages: np.ndarray  # int64, (C,), larger for entries that were learned later
    slots: np.ndarray  # int32, a hash table of entries, each plus 1; 0 is free
    state: np.ndarray  # int64, (3 + MOST_CONTEXT,), see `COUNT`


kernel_type(
    "Table",
    Table,
    "int32[:, ::1], int32[:, ::1], float32[:, ::1], int64[::1], int32[::1], int64[::1]",
)


def new_table(capacity: int, top_k: int) -> Table:
    """An empty table. It takes no memory before entries are learned: its pages are untouched."""
    return Table(
        np.zeros((capacity, MOST_CONTEXT), dtype=np.int32),
        np.zeros((capacity, top_k), dtype=np.int32),
        np.zeros((capacity, top_k), dtype=np.float32),
        np.zeros(capacity, dtype=np.int64),
        np.zeros(1 << (2 * capacity - 1).bit_length(), dtype=np.int32),
        np.array([0, 0, *np.frombuffer(os.urandom(8 * (1 + MOST_CONTEXT)), np.int64)]),
    )


@uncounted
def find(table, context):
    """The entry of a context (MOST_CONTEXT,), -1 if there is none.

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
    key = table.state[KEY:]
    mixed = key[0] + key[1] * context[0] + key[2] * context[1] + key[3] * context[2]
    return (mixed >> 32) & (len(table.slots) - 1)


@kernel(
    "int64(Table, int64, int64, int32[::1], int64[::1], int32[::1], int32[:, ::1], float32[:, ::1],"
    "int64)"
)
def learn(table, longest, vocab_size, before, tokens, parents, best_tokens, best_probs, start):
    """Enters the target's best next tokens after a text and after each node of a tree below it.

    It replaces entries of the same context, leaves out invalid probabilities, and skips nodes whose
    best one is invalid. `before` are the last tokens of the text, MOST_CONTEXT if it has them;
    `best_tokens` and `best_probs` (1 + T, k) stand after the text and each of T nodes.

    Of the (1 + T) n contexts it enters those from `start` on, n being the `longest`; returns the
    first one that it had no room for, (1 + T) n if there is none."""
    path = np.full((1 + len(parents), MOST_CONTEXT), -1, dtype=np.int32)
    for i in range(len(before)):
        path[0, i] = before[len(before) - 1 - i]
    for node in range(len(parents)):
        path[1 + node, 0] = tokens[node]
        for i in range(1, MOST_CONTEXT):
            path[1 + node, i] = path[1 + parents[node], i - 1]
    context = np.empty(MOST_CONTEXT, dtype=np.int32)
    for number in range(start, longest * len(path)):
        node = number // longest
        length = 1 + number % longest
        known = path[node]
        if not best_probs[node, 0] > 0 or known[length - 1] < 0:
            continue
        for i in range(MOST_CONTEXT):
            context[i] = known[i] if i < length else -1
        if not _write(table, context, best_tokens[node], best_probs[node], vocab_size):
            return number
    return longest * len(path)


@uncounted
def _write(table, context, best_tokens, best_probs, vocab_size):
    """Writes an entry of next tokens (k,), which becomes the newest; returns False if full."""
    entry = find(table, context)
    if entry < 0:
        entry = table.state[COUNT]
        if entry == len(table.contexts):
            return False
        table.state[COUNT] += 1
        for i in range(MOST_CONTEXT):
            table.contexts[entry, i] = context[i]
        slot = _home(table, context)
        while table.slots[slot] != 0:
            slot = (slot + 1) & (len(table.slots) - 1)
        table.slots[slot] = entry + 1
    table.state[NEWEST] += 1
    table.ages[entry] = table.state[NEWEST]
    tokens, probs = table.tokens[entry], table.probs[entry]
    for i in range(len(tokens)):
        usable = i < len(best_tokens) and 0 <= best_tokens[i] < vocab_size
        if usable and 0 < best_probs[i] <= 1:  # not NaN
            tokens[i], probs[i] = best_tokens[i], best_probs[i]
        else:
            tokens[i], probs[i] = -1, 0
    return True


@kernel("void(Table, int32[:, ::1], int32[:, ::1], float32[:, ::1])")
def enter(table, contexts, tokens, probs):
    """Replaces all entries by others, (C, MOST_CONTEXT) and (C, k), the oldest first."""
    table.state[COUNT] = 0
    table.slots[:] = 0
    for i in range(len(contexts)):
        _write(table, contexts[i], tokens[i], probs[i], 1 << 31)


@kernel("void(float32[::1], int32[::1], int64[::1])")
def count_tokens(counts, commonest, tokens):
    """Counts tokens (n,) in `counts` (V,), and keeps the commonest (c,) in order, -1 for none."""
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
