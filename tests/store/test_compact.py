"""The commonest n-grams of a corpus, against `Counter`, and the compact form made of them."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from datastores import shards_of
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_refspec.drafting.tree import DraftTree
from hf_refspec.index.crest_table import STEPS_PER_HALF, NgramTable, table_bytes
from hf_refspec.index.rest_trie import all_matches, mixed_tree, trie_tree
from hf_refspec.store.compact import (
    CONTINUATION_LENGTH,
    CONTINUATIONS,
    HEADER_BYTES,
    NODES_PER_TREE,
    CompactOptions,
    compact_form,
)
from hf_refspec.store.compact import common_ngrams as counted_ngrams
from hf_refspec.store.datastore_config import StoreConfig
from hf_refspec.store.files import write_arrays

VOCAB_SIZE = 4
MAX_NGRAM = 3
ALL = 10_000
CONFIGS = {
    "uint16": StoreConfig("", "", VOCAB_SIZE),
    "uint32": StoreConfig("", "", 2**16),
}
configs = st.sampled_from(list(CONFIGS.values()))
documents_lists = st.lists(
    st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=10), min_size=1, max_size=8
)


def count_ngrams(documents, length: int) -> Counter:
    return Counter(
        tuple(document[start : start + length])
        for document in documents
        for start in range(len(document) - length + 1)
    )


def common_ngrams(texts, max_ngram, per_order):
    return counted_ngrams(texts, max_ngram, per_order)[0]


def zipf_documents(count=60, length=50, vocab_size=VOCAB_SIZE, seed=0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    ranks = 1 / np.arange(1, vocab_size + 1)
    return rng.choice(vocab_size, (count, length), p=ranks / ranks.sum()).tolist()


# --- common_ngrams


@settings(deadline=None, max_examples=200)
@given(documents_lists, configs, st.integers(1, 4), st.integers(1, 3))
def test_common_ngrams_are_all_that_stand_twice_in_a_shard_the_commonest_first(
    documents, config, max_ngram, count
):
    orders = common_ngrams(
        shards_of(documents, count, config.token_dtype, config.vocab_size), max_ngram, ALL
    )
    assert len(orders) == max_ngram
    for length, ngrams in enumerate(orders, start=1):
        assert ngrams.dtype == np.int32 and ngrams.shape[1] == length
        parts = [count_ngrams(documents[part::count], length) for part in range(count)]
        twice = {ngram for counts in parts for ngram in counts if counts[ngram] > 1}
        found = [tuple(ngram) for ngram in ngrams.tolist()]
        assert sorted(found) == sorted(twice)
        frequencies = [sum(counts[ngram] for counts in parts) for ngram in found]
        assert frequencies == sorted(frequencies, reverse=True)


@settings(deadline=None, max_examples=200)
@given(documents_lists, st.integers(1, 6))
def test_of_one_text_none_is_left_out_for_a_rarer_one(documents, per_order):
    for length, ngrams in enumerate(common_ngrams(shards_of(documents), 3, per_order), start=1):
        counts = count_ngrams(documents, length)
        found = [counts[tuple(ngram)] for ngram in ngrams.tolist()]
        assert len(found) <= per_order
        most_common = [count for _, count in counts.most_common() if count > 1]
        assert found == most_common[: len(found)]
        if len(found) < min(per_order, len(most_common)):
            # Of those that occur equally often there are too many to choose from.
            tied = most_common[len(found)]
            assert tied not in found
            assert sum(count >= tied for count in most_common) > 2 * per_order


@pytest.mark.parametrize("count", [1, 3])
def test_the_commonest_of_a_natural_distribution_are_found(count):
    documents = zipf_documents(vocab_size=50)
    shards = shards_of(documents, count, vocab_size=50)
    for length, ngrams in enumerate(common_ngrams(shards, 2, 20), start=1):
        counts = count_ngrams(documents, length)
        found = [counts[tuple(ngram)] for ngram in ngrams.tolist()]
        assert len(found) == 20
        best = sum(frequency for _, frequency in counts.most_common(20))
        assert sum(found) == best if count == 1 else sum(found) > 0.95 * best


# --- compact_form


def form_of(documents, config=CONFIGS["uint16"], count=1, **options):
    shards = shards_of(documents, count, config.token_dtype, config.vocab_size)
    counts, table = compact_form(shards, config, CompactOptions(progress=False, **options))
    return shards, counts, table


def ngrams_of(table: NgramTable) -> list[list[int]]:
    filler = np.iinfo(table.keys.dtype).max
    keys = table.keys.reshape(-1, table.max_ngram).tolist()
    return [[token for token in key if token != filler] for key in keys]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_each_ngram_has_the_tree_that_the_corpus_gives_it(config):
    @settings(deadline=None, max_examples=50)
    @given(documents_lists, st.integers(1, 3), st.integers(1, 20))
    def check(documents, count, per_order):
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
            tokens, parents, probs = mixed_tree(
                shards, context, 1, NODES_PER_TREE, CONTINUATIONS["mixed"], CONTINUATION_LENGTH
            )
            assert tree.tokens.tolist() == tokens.tolist()
            assert tree.parents.tolist() == parents.tolist()
            # A byte holds a probability to 1/16 of a factor of two, down to 2 ** -16.
            assert np.log2(tree.probs) == pytest.approx(
                np.maximum(np.log2(probs), -255 / STEPS_PER_HALF), abs=0.51 / STEPS_PER_HALF
            )

    check()


# --- max_bytes


def file_size(table: NgramTable, folder) -> int:
    arrays = dict(list(table._asdict().items())[:6])
    return write_arrays(folder / "ngrams.safetensors", arrays).size


@pytest.mark.parametrize("max_bytes", [4096, 5000, 8191, 8192, 20_000, 50_000, 1_000_000])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_max_bytes_is_never_exceeded(config, max_bytes, tmp_path):
    _, counts, table = form_of(zipf_documents(), config, max_bytes=max_bytes)
    assert file_size(table, tmp_path) <= max_bytes
    of_arrays = table_bytes(
        len(table.starts) - 1, len(table.node_tokens), MAX_NGRAM, config.token_dtype
    )
    assert of_arrays + HEADER_BYTES <= max_bytes
    assert sum(counts) > 0


def test_max_bytes_is_used_up_where_there_is_enough_to_store():
    documents = zipf_documents(vocab_size=100)
    for max_bytes in (20_000, 60_000):
        _, _, table = form_of(documents, StoreConfig("", "", 100), max_bytes=max_bytes)
        used = table_bytes(len(table.starts) - 1, len(table.node_tokens), MAX_NGRAM, np.uint16)
        assert used + HEADER_BYTES > 0.8 * max_bytes


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


def test_ngrams_per_order_holds_with_max_bytes_as_well():
    _, counts, _ = form_of(zipf_documents(), ngrams_per_order=3, max_bytes=1_000_000)
    assert counts == [3, 3, 3]


def test_many_bytes_leave_no_tree_out():
    documents = zipf_documents()
    _, counts, table = form_of(documents, ngrams_per_order=1000, max_bytes=10**8)
    _, all_counts, all_of_it = form_of(documents, ngrams_per_order=1000)
    assert counts == all_counts
    assert table.node_tokens.tolist() == all_of_it.node_tokens.tolist()


# --- as published


def test_with_rests_trees_and_so_many_ngrams_of_each_order_it_is_crests():
    shards, counts, table = form_of(zipf_documents(), mode="rest", ngrams_per_order=3)
    assert counts == [3, 3, 3]
    for ngram in map(np.array, ngrams_of(table)):
        tokens, parents, _ = table.tree(ngram.astype(np.int32), 1, NODES_PER_TREE)
        match = all_matches(shards, ngram.astype(np.int32), len(ngram))
        limits = [CONTINUATIONS["rest"]], [CONTINUATION_LENGTH], NODES_PER_TREE, 0.0
        rest = trie_tree(shards, match, *limits)
        assert (tokens.tolist(), parents.tolist()) == (rest[0].tolist(), rest[1].tolist())
