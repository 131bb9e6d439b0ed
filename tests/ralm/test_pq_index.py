"""A PQ index finds candidates among which the nearest nearly always is; texts stay as they are."""

from __future__ import annotations

import shutil
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from knn_texts import generate
from transformers import LlamaConfig, LlamaForCausalLM

from hf_refspec.ralm.knn_datastore import KnnDatastore
from hf_refspec.ralm.options import Speculation
from hf_refspec.ralm.pq_index import LEAST_ROWS, PQIndex, axes_of
from hf_refspec.store.files import DatastoreError, write_arrays

faiss = pytest.importorskip("faiss")
CORPUS = [f"for i in range({n}):\n    print(i + {n}, {n * n})\n" for n in range(60)]


def correlated_rows(count: int, dimension: int) -> np.ndarray:
    """Rows that differ along some axes more than along others, as hidden states do."""
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((count, dimension)) / np.arange(1, dimension + 1)
    return (rows @ rng.standard_normal((dimension, dimension)) + 5).astype(np.float32)


def test_the_nearest_row_is_among_the_candidates():
    rows = correlated_rows(20_000, 96)
    index = PQIndex.build(rows)
    assert len(index) == 20_000 and index.codes.shape == (20_000, 32)
    rng = np.random.default_rng(1)
    queries = rows[rng.integers(0, len(rows), 50)] + 0.02 * rng.standard_normal((50, 96))
    hits = 0
    for query in queries.astype(np.float32):
        found = index.candidates(query, 1)
        assert len(set(found.tolist())) == len(found) == 1024
        hits += int(((rows - query) ** 2).sum(axis=1).argmin() in found)
    assert hits >= 49
    assert len(index.candidates(queries[0].astype(np.float32), 1000)) == 4000


def test_of_few_rows_all_are_candidates():
    rows = correlated_rows(100, 6)
    assert sorted(PQIndex.build(rows).candidates(rows[0], 1)) == list(range(100))


@settings(max_examples=20, deadline=None)
@given(st.integers(16, 80), st.integers(2, 70))
def test_what_is_read_is_what_was_written(tmp_path_factory, rows, dimension):
    folder = tmp_path_factory.mktemp("index")
    keys = np.random.default_rng(rows).standard_normal((rows, dimension)).astype(np.float32)
    index = PQIndex.build(keys)
    again = PQIndex.read(folder, index.write(folder), keys.shape)
    for name in ("mean", "axes", "levels", "codes"):
        assert np.array_equal(getattr(again, name), getattr(index, name))
    assert sorted(again.candidates(keys[0], 1)) == sorted(index.candidates(keys[0], 1))


def test_another_shape_or_a_number_that_is_none_is_refused(tmp_path):
    keys = correlated_rows(50, 8)
    index = PQIndex.build(keys)
    entry = index.write(tmp_path)
    for shape in ((49, 8), (50, 10)):
        with pytest.raises(DatastoreError, match="damaged"):
            PQIndex.read(tmp_path, entry, shape)
    names = ("mean", "axes", "levels", "codes")
    arrays = {name: getattr(index, name).ravel().copy() for name in names}
    arrays["levels"][3] = np.nan
    entry = write_arrays(tmp_path / entry.name, arrays)
    with pytest.raises(DatastoreError, match="levels is not finite"):
        PQIndex.read(tmp_path, entry, keys.shape)


@pytest.mark.parametrize(("shape", "least"), [((15, 8), 16), ((40, 1), 16), ((40, 5000), 5000)])
def test_too_little_for_an_index_is_refused(shape, least):
    with pytest.raises(ValueError, match=f"at least {least} rows of at least 2 numbers"):
        PQIndex.build(np.zeros(shape, dtype=np.float32))


def test_axes_are_of_an_even_number():
    assert [axes_of(d) for d in (1, 2, 7, 64, 65, 4096)] == [0, 2, 6, 64, 64, 64]


class TestOfADatastore:
    @pytest.fixture(scope="class")
    def store(self, byte_llama, tokenizer, tmp_path_factory):
        path = tmp_path_factory.mktemp("knn") / "store"
        options = {"pq_index": True, "progress": False}
        return KnnDatastore.build(byte_llama, tokenizer, CORPUS, path, **options)

    @pytest.fixture
    def prompt(self, tokenizer):
        return tokenizer("for i in ran", return_tensors="pt", return_token_type_ids=False)

    def test_a_large_one_has_one_and_a_small_one_if_asked(self, store, tokenizer, tmp_path):
        torch.manual_seed(0)
        size = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, vocab_size=259, **size))
        texts = ("".join(CORPUS) for _ in range(40))
        large = KnnDatastore.build(model, tokenizer, texts, tmp_path / "large", progress=False)
        assert len(large) > LEAST_ROWS and len(large.pq_index) == len(large)
        small = KnnDatastore.build(model, tokenizer, CORPUS, tmp_path / "small", progress=False)
        assert small.pq_index is None
        store.verify()
        assert len(store.pq_index) == len(store)
        assert KnnDatastore(store.path, "hnsw").pq_index is None

    @pytest.mark.parametrize("do_sample", [False, True])
    @pytest.mark.parametrize(("k", "speculation"), [(1, "psa"), (300, "psa"), (1, "published")])
    def test_the_text_is_the_same_whether_it_guesses_or_not(
        self, byte_llama, prompt, store, k, speculation, do_sample
    ):
        class Counted(PQIndex):
            asked = 0

            def candidates(self, query, k):
                self.asked += 1
                return super().candidates(query, k)

        store, made = KnnDatastore(store.path), store.pq_index
        store.pq_index = Counted(made.mean, made.axes, made.levels, made.codes)
        options = {"k": k, "do_sample": do_sample, "max_new_tokens": 60}
        plain = generate(byte_llama, prompt, store, speculation=None, **options)
        if speculation == "published":
            speculation = Speculation.published("s")
        ids = generate(byte_llama, prompt, store, speculation=speculation, **options)
        assert torch.equal(ids, plain)
        assert (store.pq_index.asked > 0) == (k == 1 and speculation == "psa")

    def test_one_of_garbage_makes_guesses_wrong_and_nothing_else(self, byte_llama, prompt, store):
        store, made = KnnDatastore(store.path), store.pq_index
        codes = np.random.default_rng(0).integers(0, 256, made.codes.shape).astype(np.uint8)
        store.pq_index = PQIndex(made.mean, made.axes, made.levels, codes)
        ids = [
            generate(byte_llama, prompt, store, k=2, speculation=speculation, max_new_tokens=30)
            for speculation in (None, "psa")
        ]
        assert torch.equal(*ids)

    def test_without_faiss_there_is_none(self, store, monkeypatch):
        monkeypatch.setitem(sys.modules, "faiss", None)
        assert KnnDatastore(store.path).pq_index is None

    def test_a_damaged_one_is_refused_before_work_starts(self, byte_llama, prompt, store, tmp_path):
        shutil.copytree(store.path, tmp_path / "store")
        (tmp_path / "store" / "pq_index.safetensors").write_bytes(b"")
        damaged = KnnDatastore(tmp_path / "store")
        with pytest.raises(DatastoreError, match=r"pq_index\.safetensors is damaged"):
            generate(byte_llama, prompt, damaged, k=1, max_new_tokens=2)
        with pytest.raises(DatastoreError, match="damaged"):
            damaged.verify()
