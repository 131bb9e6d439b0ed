"""Token Recycling: a target's best next tokens after 1 to n tokens, and the tree of them.

An entry of the table is a context of at most `MOST_CONTEXT` tokens, with the target's k best next
tokens and their probabilities when it was last verified. Entries are found by open addressing, and
keep their whole context and their age. A full table gives up an eighth of its entries, the oldest.

The hash has a random key, which is never stored: no table or text can be written whose contexts
collide. The content of a table does not depend on it.

In the tree, contexts of several lengths, the commonest tokens and the last position's runners-up
are pooled log-linearly: each contributes a power of its probability."""

from __future__ import annotations

import math
import os
import threading
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..kernels.kernel import kernel, kernel_type
from ..messages import check_count
from .best_first import TREE_TYPE, TreeArrays, divide, grower, njit_no_alloc

MOST_CONTEXT = 3
# The most next tokens of an entry, and entries of a table. Memory is set aside for all of them.
MOST_NEXT = 256
MOST_ENTRIES = 1 << 24
# The number of the commonest tokens that are kept in order.
COMMONEST = 8
# The numbers of `state`: how many entries there are, the age of the newest, and the first of the
# `1 + MOST_CONTEXT` that are the key of the hash.
COUNT = 0
NEWEST = 1
KEY = 2
# The number of a node's runners-up that are proposed again after it.
RUNNERS_UP = 8
# A probability counts as its multiple of this one: much smaller ones count as nothing.
LEAST_PROB = 0.003
# A less probable child is dropped: it would hardly ever be among the best nodes.
LEAST_CHILD = 1e-4
# Where more tokens are counted, all counts are halved.
_MOST_COUNTED = 1 << 14
_ANY_VOCABULARY = 2**31 - 1
# The counts of another table are scaled down to a total of this: the present text may differ.
_ENTERED_COUNT = 256


class Table(NamedTuple):
    """The arrays of a table with room for C entries.

    A context has its last token first, the next tokens are best first; -1 marks a missing token."""

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


@njit_no_alloc
def find(table, context):
    """The entry of a context (MOST_CONTEXT,), its last token first, -1 if there is none."""
    slots = table.slots
    slot = _home(table, context)
    while slots[slot] != 0:
        entry = slots[slot] - 1
        held = table.contexts[entry]
        if held[0] == context[0] and held[1] == context[1] and held[2] == context[2]:
            return entry
        slot = (slot + 1) & (len(slots) - 1)
    return -1


@njit_no_alloc
def _home(table, context):
    """The slot at which the search for a context begins (multiply-shift, Dietzfelbinger 1996)."""
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
    `best_tokens` and `best_probs` (1 + T, k) are those after the text and each of T nodes.

    With n the `longest`, there are (1 + T) n contexts. It begins with the one at `start`, and
    returns the first one that it has no room for, or their number."""
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


@njit_no_alloc
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


class Pooling(NamedTuple):
    """How a next token's probability is pooled, by the length of the longest known context."""

    # float64, (1 + MOST_CONTEXT, MOST_CONTEXT + 2), of contexts of 1, 2 and 3 tokens, of
    # frequencies and of the last position
    exponents: np.ndarray
    misses: np.ndarray  # float64, (1 + MOST_CONTEXT,), the score of all unknown tokens

    def flattened(self, power: float) -> Pooling:
        """All scores raised to a power."""
        return Pooling(power * self.exponents, self.misses**power)


kernel_type("Pooling", Pooling, "float64[:, ::1], float64[::1]")


class Learned(NamedTuple):
    """Everything learned of a target model and of the texts that it wrote."""

    table: Table
    longest: int  # tokens of a context
    commonest: np.ndarray  # int32, (COMMONEST,), -1 for none
    counts: np.ndarray  # float32, (n,), how often each token below n came
    counted: float  # all tokens that came


kernel_type("Learned", Learned, "Table, int64, int32[::1], float32[::1], float64")


class _Known(NamedTuple):
    """The data that the tree grows out of: the arguments of `recycling_tree`, and its own notes."""

    learned: Learned
    text: np.ndarray
    pooling: Pooling
    # The best at the position before the text's end, at the root and at each node.
    best_tokens: np.ndarray  # int32, (2 + budget, RUNNERS_UP), -1 for none
    best_probs: np.ndarray  # float32
    number: np.ndarray  # int64 of shape (1,), how many proposals there are so far
    # The present node's last tokens, the last one first, and the entries of its contexts.
    context: np.ndarray  # int32 of shape (MOST_CONTEXT,)
    entries: np.ndarray  # int64


@kernel(f"{TREE_TYPE}(Learned, int32[::1], int32[::1], float32[::1], Pooling, int64, boolean)")
def recycling_tree(learned, text, last_tokens, last_probs, pooling, budget, chain):
    """Grows a draft tree, best node first.

    A token's score at a node is a product: of the probabilities that it had after the last 1, 2 and
    3 tokens, of its frequency, and of the probability that it had one position earlier (a token
    that was nearly chosen often comes next). Each factor is 1 + p / LEAST_PROB to the power of an
    exponent, and 1 where nothing is known. A token's probability is its score divided by the sum of
    all scores and the score of all unknown tokens together.

    `text` (n,) is the last tokens, MOST_CONTEXT if it has them; the commonest tokens are proposed
    everywhere; `last_tokens` and `last_probs` (k,) are the target's best in place of the last
    token."""
    best_tokens = np.empty((2 + budget, RUNNERS_UP), dtype=np.int32)
    best_probs = np.empty((2 + budget, RUNNERS_UP), dtype=np.float32)
    best_tokens[0], best_probs[0] = -1, 0.0
    for i in range(min(RUNNERS_UP, len(last_tokens))):
        best_tokens[0, i], best_probs[0, i] = last_tokens[i], last_probs[i]
    found = _Known(
        learned,
        text,
        pooling,
        best_tokens,
        best_probs,
        np.ones(1, np.int64),  # grow() needs a first proposal; it proposes nothing
        np.empty(MOST_CONTEXT, np.int32),
        np.empty(MOST_CONTEXT, np.int64),
    )
    per_node = MOST_CONTEXT * learned.table.tokens.shape[1] + COMMONEST + RUNNERS_UP
    return _grow_context(found, 1, 1 + (1 + budget) * per_node, per_node, budget, chain)


@njit_no_alloc
def expand_context(found, growth, _first, node, _depth, prob):
    """Proposes the best next tokens of a node's context; returns their number."""
    for i in range(RUNNERS_UP):
        found.best_tokens[node + 2, i], found.best_probs[node + 2, i] = -1, 0.0
    start, known = _propose(found, growth, node)
    if found.number[0] == start:
        return 0
    count = divide(growth, start, node)
    weights = growth.weights
    children = growth.children
    counts = found.learned.counts
    exponents, total = found.pooling.exponents[known], found.pooling.misses[known]
    for child in children[:count]:
        token = growth.proposed[child]
        frequency = counts[token] / found.learned.counted if token < len(counts) else 0.0
        score = weights[child] + exponents[MOST_CONTEXT] * _log_score(frequency)
        weights[child] = math.exp(score)
        total += weights[child]
    kept = 0
    for child in children[:count]:
        weights[child] /= total
        _note_best(found, node, growth.proposed[child], weights[child])
        weights[child] *= prob
        if weights[child] > LEAST_CHILD:
            children[kept] = child
            kept += 1
    return kept


_grow_context = grower(expand_context)


@njit_no_alloc
def _propose(found, growth, node):
    """Proposes all tokens that are known at a node, weighted by the logarithms of their factors.

    Returns the first proposal, and the length of the longest context that is known."""
    context = found.context
    entries = found.entries
    table = found.learned.table
    place = np.int64(node)
    known = 0
    for i in range(MOST_CONTEXT):
        context[i] = entries[i] = -1
    for i in range(found.learned.longest):
        context[i], place = _token_before(found, growth, place)
        if context[i] < 0:
            break
        entries[i] = find(table, context)
        known = i + 1 if entries[i] >= 0 else known
    exponents = found.pooling.exponents[known]
    start = found.number[0]
    number = start
    for i in range(MOST_CONTEXT):
        if entries[i] >= 0:
            tokens, probs = table.tokens[entries[i]], table.probs[entries[i]]
            number = _add(growth, number, tokens, probs, exponents[i])
    before = node + 1 if node < 0 else growth.parents[node] + 2
    tokens, probs = found.best_tokens[before], found.best_probs[before]
    number = _add(growth, number, tokens, probs, exponents[MOST_CONTEXT + 1])
    for token in found.learned.commonest:
        if token >= 0:
            growth.proposed[number], growth.weights[number] = token, 0.0
            growth.following[number] = number + 1
            number += 1
    if number > start:
        growth.following[number - 1] = -1
    found.number[0] = number
    return start, known


@njit_no_alloc
def _token_before(found, growth, place):
    """The token at a place (-1 for none), and the place before it.

    Places from 0 on are nodes; below 0 they are positions in the text, from its end."""
    if place >= 0:
        return np.int32(growth.tokens[place]), np.int64(growth.parents[place])
    if len(found.text) + place < 0:
        return np.int32(-1), np.int64(place)
    return found.text[len(found.text) + place], np.int64(place - 1)


@njit_no_alloc
def _add(growth, number, tokens, probs, exponent):
    """Adds the proposals (k,) of one source; returns how many there are now."""
    for i in range(len(tokens)):
        if tokens[i] >= 0:
            growth.proposed[number] = tokens[i]
            growth.weights[number] = exponent * _log_score(probs[i])
            growth.following[number] = number + 1
            number += 1
    return number


@njit_no_alloc
def _log_score(prob):
    return math.log(1.0 + prob / LEAST_PROB)


@njit_no_alloc
def _note_best(found, node, token, prob):
    """Inserts a child among its node's best, the most probable first."""
    tokens, probs = found.best_tokens[node + 2], found.best_probs[node + 2]
    i = RUNNERS_UP - 1
    if prob <= probs[i]:
        return
    while i > 0 and probs[i - 1] < prob:
        tokens[i], probs[i] = tokens[i - 1], probs[i - 1]
        i -= 1
    tokens[i], probs[i] = token, prob


@dataclass(frozen=True)
class TableContent:
    """The content of a [`Table`], the oldest entry first."""

    contexts: np.ndarray
    tokens: np.ndarray
    probs: np.ndarray
    counts: np.ndarray  # float32, (n,), how often each token below n came
    vocab_size: int | None  # the target's; larger tokens are not learned

    def __len__(self) -> int:
        return len(self.contexts)


class NextTokens:
    """A bounded table from the last 1 to n tokens to the target's k best next tokens.

    Args:
        top_k (`int`): k.
        context (`int`): n, from 1 to 3.
        max_contexts (`int`): The most contexts. Each takes 8 k + 28 to 8 k + 36 bytes, once it is
            there.
        content ([`TableContent`], *optional*): Its first entries, or the newest `max_contexts` of
            them. A pickle has them too, and nothing that was learned since.

    Attributes:
        vocab_size (`int`, *optional*): The target's; larger tokens are not learned.
    """

    def __init__(
        self, top_k: int, context: int, max_contexts: int, content: TableContent | None = None
    ) -> None:
        check_count("top_k", top_k, most=MOST_NEXT)
        check_count("context", context, most=MOST_CONTEXT)
        check_count("max_contexts", max_contexts, most=MOST_ENTRIES)
        self.top_k = top_k
        self.context = context
        self.max_contexts = max_contexts
        self.vocab_size: int | None = None
        self._pickled = content
        self._table = new_table(max_contexts, top_k)
        self._counts = np.zeros(0, dtype=np.float32)
        self._counted = 1.0
        self._commonest = np.full(COMMONEST, -1, dtype=np.int32)
        self._lock = threading.RLock()  # kernels run without Python's own
        if content is not None:
            self.vocab_size = content.vocab_size
            self._replace_entries(content, max_contexts)
            total = max(float(content.counts.sum()), 1.0)
            self._counts = content.counts * np.float32(min(1.0, _ENTERED_COUNT / total))
            self._counted += float(self._counts.sum())
            commonest = np.argsort(-self._counts, kind="stable")[:COMMONEST]
            self._commonest[: len(commonest)] = np.where(self._counts[commonest], commonest, -1)

    def __len__(self) -> int:
        return int(self._table.state[COUNT])

    def learn(
        self,
        before: np.ndarray,
        tokens: np.ndarray,
        parents: np.ndarray,
        best_tokens: np.ndarray,
        best_probs: np.ndarray,
    ) -> None:
        """Enters the target's best next tokens after a text and each node of a tree below it."""
        entered = 0
        contexts = self.context * (1 + len(tokens))
        with self._lock:
            while True:
                entered = learn(
                    self._table,
                    self.context,
                    self.vocab_size or _ANY_VOCABULARY,
                    before,
                    tokens,
                    parents,
                    best_tokens,
                    best_probs,
                    entered,
                )
                if entered == contexts:
                    return
                self._replace_entries(self.entries(), self.max_contexts * 7 // 8)

    def learn_text(
        self, ids: np.ndarray, known: int, best_tokens: np.ndarray, best_probs: np.ndarray
    ) -> None:
        """Enters the best next tokens after each token of `ids` (int64, (n,)) from `known` on."""
        before = ids[max(known - MOST_CONTEXT, 0) : known].astype(np.int32)
        parents = np.arange(-1, len(ids) - known - 1, dtype=np.int32)
        best_tokens = np.ascontiguousarray(best_tokens)
        best_probs = np.ascontiguousarray(best_probs)
        self.learn(before, ids[known:], parents, best_tokens, best_probs)

    def count(self, tokens: np.ndarray) -> None:
        """Counts tokens (int64, (n,)) that were emitted."""
        with self._lock:
            if len(tokens) and tokens.max() >= len(self._counts):
                longer = np.zeros(1 << int(tokens.max()).bit_length(), dtype=np.float32)
                longer[: len(self._counts)] = self._counts
                self._counts = longer
            count_tokens(self._counts, self._commonest, tokens)
            self._counted += len(tokens)
            if self._counted > _MOST_COUNTED:
                self._counts *= 0.5
                self._counted *= 0.5

    def tree(
        self,
        text: np.ndarray,
        last_tokens: np.ndarray,
        last_probs: np.ndarray,
        pooling: Pooling,
        budget: int,
        chain: bool,
    ) -> TreeArrays:
        """Grows a draft tree, see [`recycling_tree`]."""
        with self._lock:
            learned = Learned(
                self._table, self.context, self._commonest, self._counts, self._counted
            )
            return recycling_tree(learned, text, last_tokens, last_probs, pooling, budget, chain)

    def entries(self) -> TableContent:
        """All entries, the oldest first."""
        with self._lock:
            table = self._table
            order = np.argsort(table.ages[: len(self)])
            contexts, tokens, probs = (each[order] for each in table[:3])
            return TableContent(contexts, tokens, probs, self._counts.copy(), self.vocab_size)

    def keep_for_pickles(self) -> None:
        """Lets pickles begin with the present entries."""
        self._pickled = self.entries()

    def _replace_entries(self, content: TableContent, count: int) -> None:
        """Replaces all entries by the newest `count` of others."""
        newest = slice(max(len(content) - count, 0), None)
        arrays = (content.contexts, content.tokens, content.probs)
        enter(self._table, *(np.ascontiguousarray(array[newest]) for array in arrays))

    def __reduce__(self) -> tuple[Any, ...]:
        return NextTokens, (self.top_k, self.context, self.max_contexts, self._pickled)

    def __deepcopy__(self, _: Any) -> NextTokens:
        twin = NextTokens(self.top_k, self.context, self.max_contexts)
        twin._take(self)
        return twin

    def _take(self, other: NextTokens) -> None:
        """Takes all that another table of the same sizes has learned."""
        with other._lock:
            content = other.entries()
            self._replace_entries(content, self.max_contexts)
            self._counts, self._counted = content.counts, other._counted
            self._commonest = other._commonest.copy()
            self.vocab_size = other.vocab_size
            self._pickled = other._pickled
