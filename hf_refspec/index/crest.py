"""CREST: the commonest n-grams of a datastore, each with a draft tree that is grown beforehand.

"CREST: Effectively Compacting a Datastore For Retrieval-Based Speculative Decoding" (arXiv
2408.04678): what REST (rest_trie.py) grows at every draft is grown once and looked up in O(1).
`common_ngrams` counts n-grams by one walk along suffix arrays. `best_nodes`, which is not CREST's,
chooses those n-grams and nodes that are accepted most often for their bytes. `pack_table` writes
them into an [`NgramTable`]: an open-addressing hash table in plain arrays, which can be mapped from
a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, TypeAlias

import numpy as np
from numba import njit

from ..kernels.kernel import kernel, kernel_type
from .best_first import TREE_TYPE, TreeArrays
from .suffix_array import DAMAGED, IndexedText

# Suffixes that are held at a time: of all texts together, and of each at least.
BLOCK, LEAST_BLOCK = 1 << 17, 1 << 12
# Rows of suffixes are their tokens plus 1, padded: with 0 after the text's last token, with
# `_SEPARATOR` after a document's. So they have the order of the suffix array.
_SEPARATOR = 2**32 - 1

# Different rows in order, each as the bytes of its big-endian numbers; and how often each occurs.
Runs: TypeAlias = tuple[np.ndarray, np.ndarray]
_HALVINGS = 40  # of the range of prices, from 1e-12 to 1e12
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


@dataclass(slots=True, eq=False)
class _Order:
    """The commonest n-grams of one length so far, in the order of their tokens."""

    wanted: int  # how many
    ngrams: np.ndarray  # uint32, (count, length), tokens plus 1
    counts: np.ndarray  # int64
    least: int = 1  # the fewest occurrences that count
    begun: int = 0  # suffixes before the current run

    def add(self, rows: np.ndarray, places: np.ndarray, ends: np.ndarray) -> None:
        """Adds the runs that end at rows `ends` (m,) of `rows` (n, length); `places` (n,) count."""
        counts = np.diff(places[ends], prepend=self.begun)
        self.begun = int(places[ends[-1]]) if len(ends) else self.begun
        last = rows[ends, -1]
        kept = (counts >= self.least) & (last > 0) & (last < _SEPARATOR)
        self.ngrams = np.concatenate([self.ngrams, rows[ends[kept]]])
        self.counts = np.concatenate([self.counts, counts[kept]])
        if len(self.counts) > 4 * self.wanted:
            order = self.commonest()
            self.least = int(self.counts[order[-1]]) + 1  # later ones lose a tie
            self.ngrams, self.counts = self.ngrams[np.sort(order)], self.counts[np.sort(order)]

    def commonest(self) -> np.ndarray:
        """The indices (m,) of the wanted ones, the commonest first."""
        return np.argsort(-self.counts, kind="stable")[: self.wanted]


def common_ngrams(
    texts: Sequence[IndexedText], longest: int, per_order: int
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Finds the commonest n-grams of each length from 1 to `longest` in all texts together.

    Returns, the commonest first, int32 arrays of shape `(count, n)`, and how often each occurs,
    int64 of shape `(count,)`. N-grams do not span documents.

    However long the texts are, it holds at most `4 * per_order + BLOCK` n-grams of each length, and
    the first tokens of `BLOCK` suffixes (of each text of `LEAST_BLOCK`, if that is more)."""
    orders = [
        _Order(per_order, np.empty((0, length), np.uint32), np.empty(0, np.int64))
        for length in range(1, longest + 1)
    ]
    before = np.zeros((1, longest), np.uint32)
    read = 0
    end = before.astype(">u4").view(f"S{4 * longest}")[0], np.zeros(1, np.int64)  # ends all runs
    size = max(BLOCK // len(texts), LEAST_BLOCK)
    for keys, counts in chain(_merged([_runs(text, longest, size) for text in texts]), [end]):
        rows = np.concatenate([before, keys.view(">u4").reshape(-1, longest).astype(np.uint32)])
        places = np.cumsum(np.concatenate([[read], counts]))
        changed = np.logical_or.accumulate(rows[1:] != rows[:-1], axis=1)
        for length, order in enumerate(orders, start=1):
            order.add(rows[:, :length], places, np.flatnonzero(changed[:, length - 1]))
        before = rows[-1:]
        read = int(places[-1])
    found = [(order, order.commonest()) for order in orders]
    ngrams = [(order.ngrams[indices] - 1).astype(np.int32) for order, indices in found]
    return ngrams, [order.counts[indices] for order, indices in found]


def _merged(streams: Sequence[Iterator[Runs]]) -> Iterator[Runs]:
    """Merges the runs of several texts; equal ones may follow each other."""
    held = {stream: runs for stream in streams if (runs := next(stream, None)) is not None}
    while held:
        until = min(keys[-1] for keys, _ in held.values())
        parts = []
        for stream, (keys, counts) in [*held.items()]:
            end = len(keys) if keys[-1] == until else np.searchsorted(keys, until, "right")
            parts.append((keys[:end], counts[:end]))
            runs = (keys[end:], counts[end:]) if end < len(keys) else next(stream, None)
            if runs is None:
                del held[stream]
            else:
                held[stream] = runs
        keys, counts = (np.concatenate(part) for part in zip(*parts, strict=True))
        order = np.argsort(keys, kind="stable")
        yield keys[order], counts[order]


def _runs(text: IndexedText, longest: int, size: int) -> Iterator[Runs]:
    """Yields the runs of `size` suffixes at a time of one text."""
    for start in range(0, len(text.suffixes), size):
        suffixes = text.suffixes[start : start + size]
        rows = np.empty((len(suffixes), longest), np.uint32)
        counts = np.empty(len(suffixes), np.int64)
        number = count_runs(text.tokens, suffixes, text.vocab_size, rows, counts)
        keys = rows[:number].astype(">u4").view(f"S{4 * longest}")
        yield keys.reshape(-1), counts[:number]


_COUNTS = "int64({0}[::1], int32[::1], int64, uint32[:, ::1], int64[::1])"


@kernel(_COUNTS.format("uint16"), _COUNTS.format("uint32"), drafts=False)
def count_runs(tokens, suffixes, vocab_size, rows, counts):
    """Writes the distinct first tokens of sorted suffixes (n,) into `rows` (n, longest).

    How many in a row have the same is written into `counts` (n,). Returns the number of rows.
    Tokens from `vocab_size` on separate documents."""
    number = 0
    for i in range(len(suffixes)):
        position = np.int64(suffixes[i])
        if position < 0 or position >= len(tokens):
            raise ValueError(DAMAGED)
        value = np.int64(1)
        same = number > 0
        for column in range(rows.shape[1]):
            if 0 < value < _SEPARATOR:
                if position + column >= len(tokens):
                    value = 0
                elif tokens[position + column] >= vocab_size:
                    value = _SEPARATOR
                else:
                    value = np.int64(tokens[position + column]) + 1
            rows[number, column] = value
            same = same and rows[number - 1, column] == value
        if same:
            counts[number - 1] += 1
        else:
            counts[number] = 1
            number += 1
    return number


def best_nodes(
    ngrams: Sequence[np.ndarray],
    counts: np.ndarray,
    trees: Sequence[TreeArrays],
    bytes_of: Callable[[int, int], int],
    max_bytes: int,
) -> np.ndarray:
    """Chooses how many nodes of each tree to keep, the most probable first: int64 `(entries,)`.

    An n-gram with 0 is left out. `ngrams` has the n-grams of each order from 1 on, int32 of shape
    `(count, n)`, `counts` (entries,) how often each occurs.

    Every byte has one price in accepted tokens. A node is kept if it is worth its bytes, and an
    n-gram if its nodes are worth theirs and its own. The price is the lowest at which `bytes_of`
    the numbers of n-grams and nodes is at most `max_bytes`."""
    starts = np.cumsum([0, *(len(tokens) for tokens, _, _ in trees)])
    tokens, parents, probs = (np.concatenate(parts) for parts in zip(*trees, strict=True))
    all_ngrams = chain.from_iterable(order.tolist() for order in ngrams)
    index = {tuple(ngram): entry for entry, ngram in enumerate(all_ngrams)}
    # The index of each n-gram without its first token.
    shorter = np.array([index.get(ngram[1:], -1) for ngram in index], dtype=np.int64)
    replaced = replaced_nodes(starts, tokens, parents, shorter)
    sizes = np.diff(starts)
    if bytes_of(len(trees), len(tokens)) <= max_bytes:
        return sizes
    many = 1 << 20
    entry_bytes = bytes_of(many, 0) / many
    node_bytes = bytes_of(0, many) / many
    low, high = 1e-12, 1e12
    best = np.zeros_like(sizes)
    for _ in range(_HALVINGS):
        price = (low * high) ** 0.5
        sizes = worth_keeping(
            starts, probs, counts, shorter, replaced, price * entry_bytes, price * node_bytes
        )
        if bytes_of(int((sizes > 0).sum()), int(sizes.sum())) <= max_bytes:
            best, high = sizes, price
        else:
            low = price
    return best


@kernel("int32[::1](int64[::1], int64[::1], int32[::1], int64[::1])", drafts=False)
def replaced_nodes(starts, tokens, parents, shorter):
    """The index of each node's path in the shorter n-gram's tree, or -1, int32 `(nodes,)`."""
    replaced = np.full(len(tokens), -1, dtype=np.int32)
    for entry in range(len(shorter)):
        other = shorter[entry]
        if other < 0:
            continue
        for node in range(starts[entry], starts[entry + 1]):
            parent = parents[node]
            if parent >= 0:
                parent = replaced[starts[entry] + parent]
                if parent < 0:
                    continue
            for same in range(starts[other], starts[other + 1]):
                if parents[same] == parent and tokens[same] == tokens[node]:
                    replaced[node] = same - starts[other]
                    break
    return replaced


_WORTH = (
    "int64[::1](int64[::1], float32[::1], int64[::1], int64[::1], int32[::1], float64, float64)"
)


@kernel(_WORTH, drafts=False)
def worth_keeping(starts, probs, counts, shorter, replaced, entry_price, node_price):
    """How many nodes of each tree (int64, `(entries,)`) are worth their price and the n-gram's."""
    sizes = np.zeros(len(counts), dtype=np.int64)
    for entry in range(len(counts)):  # the shorter n-grams come first
        other = shorter[entry]
        if other >= 0 and sizes[other] == 0:
            continue
        start = starts[entry]
        end = starts[entry + 1]
        size = 0
        worth = -entry_price
        while start + size < end and counts[entry] * probs[start + size] >= node_price:
            worth += counts[entry] * probs[start + size] - node_price
            size += 1
        for node in range(start, end):
            if other >= 0 and 0 <= replaced[node] < sizes[other]:
                worth -= counts[entry] * probs[node]
        sizes[entry] = size if worth > 0 else 0
    return sizes


class NgramTable(NamedTuple):
    """n-grams and their draft trees in plain arrays, perhaps mapped from an unchecked file.

    `keys` holds the tokens of each n-gram, filled up with the largest number of the type, and
    `slots` by hash the n-gram's index + 1; 0 is free, and a collision moves on to the next slot."""

    keys: np.ndarray  # uint16 or uint32, (entries * max_ngram,)
    slots: np.ndarray  # uint32, (a power of two,)
    starts: np.ndarray  # uint32, (entries + 1,), where each tree begins, and where the last ends
    node_tokens: np.ndarray  # as keys, (nodes,)
    node_parents: np.ndarray  # uint8, (nodes,), indices in the tree
    node_probs: np.ndarray  # uint8, (nodes,): prob = 2 ** -(byte / 16)
    max_ngram: int
    vocab_size: int  # all tokens are below it

    def tree(self, context: np.ndarray, min_match: int, budget: int) -> TreeArrays:
        """Looks up the draft tree of the longest n-gram that a context (int32, (n,)) ends with."""
        return look_up(self, context, min_match, min(budget, LARGEST_TREE))


for _dtype in ("uint16", "uint32"):
    _tokens = f"{_dtype}[::1]"
    kernel_type(
        f"NgramTable_{_dtype}",
        NgramTable,
        f"{_tokens}, uint32[::1], uint32[::1], {_tokens}, uint8[::1], uint8[::1], int64, int64",
    )


def pack_table(
    ngrams: Sequence[np.ndarray], trees: Sequence[TreeArrays], dtype: np.dtype, vocab_size: int
) -> NgramTable:
    """Packs n-grams of each order from 1 on (int32, `(count, n)`) and their trees into a table.

    A tree has at most 255 nodes."""
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
    parts = zip(*trees, strict=True) if trees else ([[]], [[]], [[]])
    tokens, parents, probs = (np.concatenate(part) for part in parts)
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
    """The least power of two that leaves a quarter of the slots or more free."""
    needed = -(-4 * entries // 3)
    return 1 << max(needed - 1, 0).bit_length()


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
    """Enters all n-grams of `keys`, of the shapes of an `NgramTable`, into free `slots`."""
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
    """The index of an n-gram (n,), -1 if it is not there."""
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
    """The tree of the longest n-gram that `context` (n,) ends with, see `NgramTable.tree`."""
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
