"""The compact form of a datastore."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_refspec.drafting.tree import DraftTree
from hf_refspec.index.crest import STEPS_PER_HALF, NgramTable, table_bytes
from hf_refspec.index.rest_trie import mixed_tree, rest_tree
from hf_refspec.store.crest import (
    HEADER_BYTES,
    NODES_PER_TREE,
    build_ngram_table,
)
from hf_refspec.store.datastore_config import StoreConfig
from hf_refspec.store.files import write_arrays
from tests.helpers.datastores import shards_of

VOCAB_SIZE = 4
MAX_NGRAM = 3
ALL = 10_000
DEFAULTS = {
    "published": False,
    "max_ngram": 3,
    "ngrams_per_order": None,
    "max_bytes": None,
    "progress": False,
}
CONFIGS = {
    "uint16": StoreConfig("", "", VOCAB_SIZE),
    "uint32": StoreConfig("", "", 2**16),
}
documents_lists = st.lists(
    st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=10), min_size=1, max_size=8
)


def zipf_documents(count=60, length=50, vocab_size=VOCAB_SIZE, seed=0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    ranks = 1 / np.arange(1, vocab_size + 1)
    return rng.choice(vocab_size, (count, length), p=ranks / ranks.sum()).tolist()


# --- build_ngram_table


def form_of(documents, config=CONFIGS["uint16"], count=1, **options):
    shards = shards_of(documents, count, config.token_dtype, config.vocab_size)
    counts, table = build_ngram_table(shards, config, **{**DEFAULTS, **options})
    return shards, counts, table


def ngrams_of(table: NgramTable) -> list[list[int]]:
    filler = np.iinfo(table.keys.dtype).max
    keys = table.keys.reshape(-1, table.max_ngram).tolist()
    return [[token for token in key if token != filler] for key in keys]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@given(documents_lists, st.integers(1, 3), st.integers(1, 20))
def test_each_ngram_has_the_tree_that_the_corpus_gives_it(config, documents, count, per_order):
    shards, counts, table = form_of(documents, config, count, ngrams_per_order=per_order)
    assert sum(counts) == len(table.starts) - 1
    assert [len(ngram) for ngram in ngrams_of(table)] == [
        length for length, number in enumerate(counts, start=1) for _ in range(number)
    ]
    assert max(counts) <= per_order
    for ngram in ngrams_of(table):
        context = np.array(ngram, np.int32)
        tree = DraftTree(*table.tree(context, 1, NODES_PER_TREE))
        tree.checked(VOCAB_SIZE)
        tokens, parents, probs = mixed_tree(shards, context, 1, NODES_PER_TREE)
        assert tree.tokens.tolist() == tokens.tolist()
        assert tree.parents.tolist() == parents.tolist()
        # A byte holds a probability to 1/16 of a factor of two, down to 2 ** -16.
        assert np.log2(tree.probs) == pytest.approx(
            np.maximum(np.log2(probs), -255 / STEPS_PER_HALF), abs=0.51 / STEPS_PER_HALF
        )


# --- max_bytes


def file_size(table: NgramTable, folder) -> int:
    arrays = dict(list(table._asdict().items())[:6])
    return write_arrays(folder / "ngrams.safetensors", arrays).size


@pytest.mark.parametrize("max_bytes", [4096, 5000, 8191, 8192, 20_000, 50_000, 1_000_000])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_max_bytes_is_used_up_and_never_exceeded(config, max_bytes, tmp_path):
    documents = zipf_documents()
    _, counts, table = form_of(documents, config, max_bytes=max_bytes)
    assert sum(counts) > 0
    everything = form_of(documents, config, ngrams_per_order=20_000)[1]
    if counts != everything:  # else all of it is smaller
        assert 0.8 * max_bytes < file_size(table, tmp_path) + HEADER_BYTES
    assert file_size(table, tmp_path) <= max_bytes
    few, _ = form_of(documents, config, max_bytes=max_bytes, ngrams_per_order=3)[1:]
    assert max(few) <= 3


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_by_default_the_compact_form_is_no_larger_than_the_full_one(config, tmp_path):
    shards, _, table = form_of(zipf_documents(), config)
    full = sum(shard.tokens.nbytes + shard.suffixes.nbytes for shard in shards)
    everything = form_of(zipf_documents(), config, ngrams_per_order=20_000)[2]
    size = file_size(table, tmp_path)
    assert 0.8 * full < size + HEADER_BYTES and size <= full < file_size(everything, tmp_path)


def test_max_bytes_keeps_more_accepted_tokens_than_the_commonest_ngrams_would():
    documents = zipf_documents(count=200, vocab_size=100)
    config = StoreConfig("", "", 100)

    def accepted(table: NgramTable) -> float:
        """Expected over the places of the corpus itself."""
        total = 0.0
        for document in documents:
            for end in range(1, len(document)):
                context = np.array(document[max(end - 3, 0) : end], np.int32)
                total += float(table.tree(context, 1, NODES_PER_TREE)[2].sum())
        return total

    _, _, best = form_of(documents, config, max_bytes=12_000)
    for per_order in range(1, 100):
        _, _, common = form_of(documents, config, ngrams_per_order=per_order)
        size = table_bytes(len(common.starts) - 1, len(common.node_tokens), MAX_NGRAM, np.uint16)
        if size + HEADER_BYTES > 12_000:
            break
        assert accepted(best) > accepted(common)
    assert per_order > 3


# --- as published


def test_with_rests_trees_and_so_many_ngrams_of_each_order_it_is_crests():
    shards, counts, table = form_of(zipf_documents(), published=True, ngrams_per_order=3)
    assert counts == [3, 3, 3]
    for ngram in ngrams_of(table):
        context = np.array(ngram, np.int32)
        tokens, parents, _ = table.tree(context, 1, NODES_PER_TREE)
        rest = rest_tree(shards, context, len(ngram), NODES_PER_TREE)
        assert (tokens.tolist(), parents.tolist()) == (rest[0].tolist(), rest[1].tolist())
