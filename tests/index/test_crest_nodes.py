"""Which n-grams and nodes are kept, against a plain twin."""

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hf_refspec.index.crest import best_nodes, replaced_nodes, worth_keeping
from hf_refspec.index.rest_trie import mixed_tree
from hf_refspec.index.suffix_array import IndexedText, build_suffix_array
from tests.helpers.trees import paths

VOCAB_SIZE = 4
texts = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=3, max_size=40)


def forms_of(text: list[int]):
    """All n-grams of up to three tokens, the commonest first, their counts and trees."""
    array = np.array([*text, 2**16 - 1], np.uint16)
    indexed = [IndexedText(array, build_suffix_array(array), VOCAB_SIZE)]
    orders, counts, trees = [], [], []
    for n in (1, 2, 3):
        found = Counter(tuple(text[i : i + n]) for i in range(len(text) - n + 1)).most_common()
        orders.append(np.array([ngram for ngram, _ in found], np.int32).reshape(-1, n))
        counts += [count for _, count in found]
        trees += [mixed_tree(indexed, ngram, 1, 8) for ngram in orders[-1]]
    return orders, np.array(counts), trees


def bytes_of(entries: int, nodes: int) -> int:
    return 20 * entries + 4 * nodes


def twin(orders, counts, trees, entry_price: float, node_price: float) -> list[int]:
    """Of each n-gram, how many nodes are worth their price."""
    sizes: dict[tuple[int, ...], int] = {}
    held = {
        tuple(g): t for g, t in zip((g for o in orders for g in o.tolist()), trees, strict=True)
    }
    for (ngram, tree), count in zip(held.items(), counts.tolist(), strict=True):
        values = [count * float(prob) for prob in tree[2]]
        worth = [value - node_price for value in values if value >= node_price]
        shorter = held.get(ngram[1:])
        there = set(paths(*shorter)[: sizes[ngram[1:]]]) if shorter is not None else set()
        lost = [v for v, path in zip(values, paths(*tree), strict=True) if path in there]
        is_beside = sizes.get(ngram[1:], 1) > 0
        kept = is_beside and sum(worth) - sum(lost) > entry_price
        sizes[ngram] = len(worth) if kept else 0
    return list(sizes.values())


@given(texts, st.floats(0.1, 20), st.floats(0.05, 3))
def test_nodes_and_ngrams_are_kept_that_are_worth_their_price(text, entry_price, node_price):
    orders, counts, trees = forms_of(text)
    starts = np.cumsum([0, *(len(tree[0]) for tree in trees)])
    tokens, parents, probs = (np.concatenate(parts) for parts in zip(*trees, strict=True))
    index = {tuple(g): i for i, g in enumerate(g for order in orders for g in order.tolist())}
    shorter = np.array([index.get(ngram[1:], -1) for ngram in index])
    replaced = replaced_nodes(starts, tokens, parents, shorter)
    prices = entry_price + 1e-4, node_price + 1e-4  # not equal to a value
    sizes = worth_keeping(starts, probs, counts, shorter, replaced, *prices)
    assert sizes.tolist() == twin(orders, counts, trees, *prices)


@given(texts, st.integers(0, 3000))
def test_what_is_kept_fits_and_begins_each_tree(text, max_bytes):
    orders, counts, trees = forms_of(text)
    sizes = best_nodes(orders, counts, trees, bytes_of, max_bytes)
    assert bytes_of(int((sizes > 0).sum()), int(sizes.sum())) <= max_bytes
    full = np.array([len(tree[0]) for tree in trees])
    assert (sizes <= full).all()
    if bytes_of(len(full), int(full.sum())) <= max_bytes:
        assert sizes.tolist() == full.tolist()
