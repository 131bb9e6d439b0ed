"""Shards are merged, by extensions or when asked, and hold the same documents."""

import os
import random
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_refspec.store.datastore import Datastore
from hf_refspec.store.datastore_config import LARGEST_SHARD, ShardEntry, StoreConfig
from hf_refspec.store.files import DatastoreError, FileEntry
from hf_refspec.store.shards import GROWTH, grouped
from tests.helpers.datastores import documents_of
from tests.helpers.stored import content_of, flip_last_bit

SMALL = {"num_proc": 1, "shard_tokens": 500}


@pytest.fixture
def store(tmp_path, tokenizer) -> Path:
    """One large shard, and one small one."""
    texts = ["def self return é \n x " * (i % 5) for i in range(30)]
    path = Datastore.build(texts, tokenizer, tmp_path / "store", **SMALL).path
    Datastore(path).add([[7, 8, 9]], tokenizer, **SMALL)
    return path


def sizes_of(folder: Path) -> list[int]:
    return [shard.tokens for shard in StoreConfig.read(folder).shards]


def test_shards_stay_few_in_whatever_order_documents_come(tmp_path, tokenizer):
    for seed in range(3):
        path, texts = tmp_path / str(seed), [[5] * 40]
        Datastore.build(texts, tokenizer, path, **SMALL)
        for length in random.Random(seed).choices([1, 30, 400], k=25):
            texts.append([random.Random(length).randrange(200) for _ in range(length)])
            Datastore(path).add(texts[-1:], tokenizer, **SMALL)
            sizes = sizes_of(path)
            assert all(older > 4 * newer for older, newer in pairwise(sizes))
        assert documents_of(path) == texts


def test_merging_leaves_one_shard_of_the_same_documents(store, tokenizer):
    before = documents_of(store)
    reader = Datastore(store)
    assert len(sizes_of(store)) > 1
    merged = reader.merge()
    assert len(merged.shards) == 1 and documents_of(store) == before
    assert set(os.listdir(store)) == {"config.json", *(each.name for each in merged.config.files())}
    # Who had it open still has all of it, though its files are gone.
    assert [ids.tolist() for ids in reader.iter_documents()] == before
    as_merged = content_of(store)
    merged.merge()
    assert content_of(store) == as_merged


@pytest.mark.parametrize("kind", ["tokens_file", "suffixes_file"])
def test_a_damaged_shard_is_not_merged(tokenizer, store, kind):
    path = store / getattr(StoreConfig.read(store).shards[0], kind).name
    flip_last_bit(path)
    before = content_of(store)
    with pytest.raises(DatastoreError, match=f"{path.name} is damaged: its checksum"):
        Datastore(store).merge()
    assert content_of(store) == before


def test_the_compact_form_has_nothing_to_merge(tmp_path, store):
    path = Datastore(store).compact(tmp_path / "compact").path
    with pytest.raises(DatastoreError, match="only the compact form"):
        Datastore(path).merge()


def grouped_sizes(sizes: list[int]) -> list[int]:
    file = FileEntry("", 0, "")
    groups = grouped([ShardEntry(size, 0, file, file) for size in sizes])
    assert [shard.tokens for group in groups for shard in group] == sizes
    return [sum(shard.tokens for shard in group) for group in groups]


@given(st.lists(st.integers(1, 1000), max_size=30))
def test_sizes_grow_geometrically(added):
    sizes: list[int] = []
    for size in added:
        sizes = grouped_sizes([*sizes, size])
        assert all(one > GROWTH * next_one for one, next_one in pairwise(sizes))
    assert all(one > GROWTH * next_one for one, next_one in pairwise(grouped_sizes(added)))


def test_the_largest_shards_are_left_alone():
    assert grouped_sizes([LARGEST_SHARD, LARGEST_SHARD, 10]) == [LARGEST_SHARD, LARGEST_SHARD, 10]
    assert grouped_sizes([LARGEST_SHARD, 10, 10]) == [LARGEST_SHARD, 20]
    assert grouped_sizes([]) == []
