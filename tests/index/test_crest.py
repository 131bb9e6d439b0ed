"""The table from n-grams to draft trees, against a dict."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_refspec.drafting.tree import DraftTree
from hf_refspec.index import crest
from hf_refspec.index.crest import (
    LARGEST_TREE,
    ROOT_BYTE,
    STEPS_PER_HALF,
    NgramTable,
    fill_slots,
    look_up,
    pack_table,
    table_bytes,
)
from tests.helpers.guarded import Guarded, guarded_arrays
from tests.helpers.trees import draft_trees

VOCAB_SIZE = 5
BUDGET = 8
tokens = st.integers(0, VOCAB_SIZE - 1)
UINT16, UINT32 = np.dtype(np.uint16), np.dtype(np.uint32)
types = st.sampled_from([UINT16, UINT32])
contexts = st.lists(tokens, max_size=6)
trees = draft_trees(VOCAB_SIZE, BUDGET)


entries = st.dictionaries(st.lists(tokens, min_size=1, max_size=3).map(tuple), trees, max_size=20)


def table_of(entries, dtype=UINT16, max_ngram=3, vocab_size=VOCAB_SIZE) -> NgramTable:
    orders = [[key for key in entries if len(key) == n] for n in range(1, max_ngram + 1)]
    ngrams = [np.array(keys, np.int32).reshape(-1, n) for n, keys in enumerate(orders, start=1)]
    trees = [entries[key] for keys in orders for key in keys]
    return pack_table(
        ngrams, [(tree.tokens, tree.parents, tree.probs) for tree in trees], dtype, vocab_size
    )


def tree_of(table: NgramTable, context, min_match=1, budget=BUDGET) -> DraftTree:
    tree = DraftTree(*table.tree(np.array(context, np.int32), min_match, budget))
    tree.checked(table.vocab_size)
    return tree


def quantised(probs: np.ndarray) -> list[float]:
    """What is left of probabilities that are stored in a byte."""
    steps = np.round(-STEPS_PER_HALF * np.log2(np.maximum(probs, 1e-9)))
    return (2.0 ** (-np.minimum(steps, 255) / STEPS_PER_HALF)).tolist()


def assert_is(tree: DraftTree, stored: DraftTree):
    assert tree.tokens.tolist() == stored.tokens.tolist()
    assert tree.parents.tolist() == stored.parents.tolist()
    assert tree.probs.tolist() == pytest.approx(quantised(stored.probs), rel=1e-6)


def look_up_slowly(entries, context, min_match, max_ngram=3) -> DraftTree:
    """The twin of `look_up`: a dict."""
    for length in range(min(max_ngram, len(context)), min_match - 1, -1):
        if tuple(context[-length:]) in entries:
            return entries[tuple(context[-length:])]
    return DraftTree.empty()


# --- look-up


@given(entries, contexts, st.integers(1, 4), types)
def test_the_tree_is_that_of_the_longest_known_ngram(entries, context, min_match, dtype):
    table = table_of(entries, dtype)
    assert_is(tree_of(table, context, min_match), look_up_slowly(entries, context, min_match))


@given(trees, st.integers(0, BUDGET))
def test_a_smaller_budget_keeps_the_first_nodes(tree, budget):
    kept = DraftTree(tree.tokens[:budget], tree.parents[:budget], tree.probs[:budget])
    assert_is(tree_of(table_of({(1,): tree}), [1], budget=budget), kept)


@pytest.mark.parametrize("dtype", [UINT16, UINT32], ids=str)
def test_the_largest_tree_and_the_largest_tokens_can_be_stored(dtype):
    token = 2**16 - 2 if dtype == UINT16 else 2**31 - 2
    chain = DraftTree.chain([token] * LARGEST_TREE, np.linspace(1, 0.5, LARGEST_TREE))
    table = table_of({(token, token): chain}, dtype, vocab_size=token + 1)
    assert_is(tree_of(table, [token, token], budget=1000), chain)


def test_probabilities_lose_at_most_a_fiftieth():
    probs = np.sort(np.random.default_rng(0).uniform(2e-5, 1, 200))[::-1].astype(np.float32)
    table = table_of({(1,): DraftTree.chain([1] * 200, probs)})
    assert tree_of(table, [1], budget=200).probs == pytest.approx(probs, rel=0.022)


# --- hashes


def slot_of(ngram, slot_count: int) -> int:
    """The twin of the hash: where an n-gram belongs."""
    mixed = 14695981039346656037
    for token in ngram:
        mixed = (mixed ^ token) * 1099511628211 % 2**64
    return (mixed ^ mixed >> 29) % slot_count


@given(st.lists(st.integers(0, 70_000), min_size=1, max_size=3), types)
def test_an_ngram_has_the_slot_that_it_has_in_published_tables(ngram, dtype):
    filler = np.iinfo(dtype).max
    key = [token % filler for token in ngram]
    slots = np.zeros(64, np.uint32)
    fill_slots(np.array([*key, filler, filler][:3], dtype), 3, slots)
    assert np.flatnonzero(slots).tolist() == [slot_of(key, 64)]


@given(entries, contexts, st.integers(1, 3), types)
def test_no_slot_free_is_no_wrong_entry(entries, context, min_match, dtype):
    # As few slots as hold the n-grams, even none to spare: nearly all of them collide.
    table = table_of(entries, dtype)
    slot_count = 1
    while slot_count < len(entries):
        slot_count *= 2
    slots = np.zeros(slot_count, np.uint32)
    fill_slots(table.keys, table.max_ngram, slots)
    tree = tree_of(table._replace(slots=slots), context, min_match)
    assert_is(tree, look_up_slowly(entries, context, min_match))


# --- size


@given(entries, types, st.integers(3, 5))
def test_table_bytes_is_the_size_of_the_arrays(entries, dtype, max_ngram):
    table = table_of(entries, dtype, max_ngram)
    arrays = table[:6]
    nodes = sum(map(len, entries.values()))
    assert table_bytes(len(entries), nodes, max_ngram, dtype) == sum(a.nbytes for a in arrays)
    assert 3 * len(table.slots) >= 4 * len(entries) and len(table.slots) > len(entries)


# --- damaged arrays


def damaged(name: str, values) -> NgramTable:
    table = table_of(
        {
            (1,): DraftTree.chain([1, 2, 3]),
            (2,): DraftTree.chain([1]),
        },
        max_ngram=1,
    )
    array = getattr(table, name)
    return table._replace(**{name: np.array(values, array.dtype)})


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("slots", [3, 3, 3, 3]),
        ("slots", [2**32 - 1] * 4),
        ("starts", [4, 3, 4]),
        ("starts", [0, 5, 5]),
        ("starts", [2**32 - 1] * 3),
        ("starts", [2**31, 4, 4]),
        ("node_parents", [0, 0, 1, ROOT_BYTE]),
        ("node_parents", [1, ROOT_BYTE, 1, ROOT_BYTE]),
        ("node_parents", [ROOT_BYTE, 0, 254, ROOT_BYTE]),
        ("node_tokens", [1, 2, VOCAB_SIZE, 1]),
        ("node_tokens", [2**16 - 1, 2, 3, 1]),
    ],
)
def test_damaged_arrays_are_refused(name, values):
    with pytest.raises(ValueError, match=r"the datastore is damaged: .* Datastore.verify\(\)"):
        tree_of(damaged(name, values), [1])


def test_slots_that_are_all_taken_by_others_end_the_search():
    assert len(tree_of(damaged("slots", [2, 2, 2, 2]), [1])) == 0


@st.composite
def damaged_tables(draw):
    """Arrays of any content; only their lengths fit together, as those of a store that is open."""
    max_ngram, entry_count, nodes = (draw(st.integers(*span)) for span in ((1, 3), (0, 4), (0, 6)))
    few = st.integers(0, 6)
    bytes_, numbers = few | st.sampled_from([254, 255]), few | st.just(2**32 - 1)
    return NgramTable(
        keys=draw(guarded_arrays(few | st.just(2**16 - 1), np.uint16, entry_count * max_ngram)),
        slots=draw(guarded_arrays(numbers, np.uint32, 2 ** draw(st.integers(0, 3)))),
        starts=draw(guarded_arrays(numbers, np.uint32, entry_count + 1)),
        node_tokens=draw(guarded_arrays(few | st.just(2**16 - 1), np.uint16, nodes)),
        node_parents=draw(guarded_arrays(bytes_, np.uint8, nodes)),
        node_probs=draw(guarded_arrays(bytes_, np.uint8, nodes)),
        max_ngram=max_ngram,
        vocab_size=VOCAB_SIZE,
    )


@pytest.fixture
def uncompiled(monkeypatch):
    """Kernels run as plain Python, where arrays can be guarded."""
    for name in ("_hash", "_find"):
        monkeypatch.setattr(crest, name, getattr(crest, name).py_func)
    with np.errstate(over="ignore"):
        yield


@pytest.mark.hypothesis
def test_no_table_makes_look_up_read_outside(uncompiled):
    @given(damaged_tables(), contexts, st.integers(1, 5))
    def check(table, context, budget):
        try:
            tree = look_up.python(table, np.array(context, np.int32).view(Guarded), 1, budget)
        except ValueError:
            return
        nodes, parents, probs = (array.tolist() for array in tree)
        assert len(nodes) <= budget
        assert all(token < VOCAB_SIZE for token in nodes)
        assert all(-1 <= parent < node for node, parent in enumerate(parents))
        assert all(
            0 < p <= (probs[parent] if parent >= 0 else 1)
            for p, parent in zip(probs, parents, strict=True)
        )

    check()
