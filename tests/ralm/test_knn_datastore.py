import json
import shutil
from copy import copy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from hf_refspec.corpus.tokenise import windows
from hf_refspec.ralm.knn_datastore import KnnDatastore, recorded
from hf_refspec.store.files import DatastoreError
from hf_refspec.store.hub import card
from hf_refspec.text_config import text_config
from tests.helpers.architectures import ARCHITECTURES
from tests.helpers.knn_texts import CORPUS, generate
from tests.helpers.stored import rewrite


@pytest.fixture(scope="module")
def path(store):
    return store.path


@pytest.fixture
def built(byte_llama, tokenizer, tmp_path):
    def build(model=byte_llama, documents=CORPUS, **options):
        return KnnDatastore.build(documents, tokenizer, model, tmp_path / "s", **options)

    return build


def other_model(**changes) -> LlamaForCausalLM:
    torch.manual_seed(1)
    config = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 259, **changes}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, num_attention_heads=4, **config))


class TestWindows:
    @given(st.lists(st.integers(0, 200), min_size=1, max_size=4), st.integers(4, 20))
    def test_every_token_but_the_first_is_predicted_once_in_order_after_enough_others(
        self, lengths, size
    ):
        texts = [np.arange(1000 * i, 1000 * i + length) for i, length in enumerate(lengths)]
        pieces = list(windows(texts, size, 10_000))
        predicted = [piece.ids[piece.known :] for piece in pieces]
        assert np.array_equal(
            np.concatenate([*predicted, []]), np.concatenate([text[1:] for text in texts])
        )
        for piece in pieces:
            assert len(piece.ids) <= size
            # A quarter of the window, or the whole text before it.
            assert piece.ids[0] % 1000 == 0 or piece.known == size // 4


class TestBuild:
    def test_an_entry_is_the_state_before_a_token_and_the_token(self, byte_llama, tokenizer, store):
        entry = 0
        for text in CORPUS:
            ids = tokenizer(text, return_tensors="pt")["input_ids"]
            with recorded(byte_llama, "last_mlp") as hidden, torch.no_grad():
                byte_llama(ids)
            for position in range(ids.shape[1] - 1):
                expected = hidden.states[0, position].numpy()
                assert np.allclose(store.keys[entry], expected, atol=1e-4)
                assert store.values[entry] == ids[0, position + 1]
                entry += 1
        assert entry == len(store)

    def test_or_it_is_the_last_hidden_state(self, byte_llama, tokenizer, built):
        store = built(documents=CORPUS[:1], layer="last_hidden")
        ids = tokenizer(CORPUS[0], return_tensors="pt")["input_ids"]
        with torch.no_grad():
            expected = byte_llama.model(ids).last_hidden_state[0, :-1]
        assert np.allclose(store.keys, expected.numpy(), atol=1e-4)

    def test_float16_takes_half_of_the_disk(self, built, store):
        half = built(key_dtype="float16")
        assert half.keys.dtype == np.float32
        assert np.allclose(half.keys, store.keys, atol=1e-2)
        assert half.config.file.size < 0.7 * store.config.file.size
        assert half.search([half.keys[7]], 1)[0].scores[0] == 0

    def test_it_ends_with_max_entries(self, built, store):
        assert np.array_equal(built(max_entries=20).values, store.values[:20])

    @pytest.mark.parametrize(
        ("documents", "error", "message"),
        [
            ([], ValueError, "documents has no text"),
            ("", FileNotFoundError, "itself goes into a list"),
            (["", "x"], ValueError, "documents has no text"),
            (["text", 7], ValueError, "document 1 must be a text"),
            ([[1, 2]], ValueError, "text input must be of type `str`"),
        ],
    )
    def test_documents_without_text_are_refused_and_nothing_stays(
        self, built, documents, error, message, tmp_path
    ):
        with pytest.raises(error, match=message):
            built(documents=documents)
        assert list(tmp_path.iterdir()) == []

    def test_states_that_are_not_finite_are_refused_and_nothing_stays(self, built, tmp_path):
        broken = other_model()
        with torch.no_grad():
            broken.model.layers[-1].post_attention_layernorm.weight[3] = torch.nan
        with pytest.raises(ValueError, match="not finite"):
            built(broken)
        assert list(tmp_path.iterdir()) == []


class TestOpening:
    def test_repr_and_card_show_what_is_in_it(self, path, store):
        held = f"entries={len(store):,}, dimension=32, model={store.config.model!r}"
        assert repr(store) == f"KnnDatastore('{path}', index='flat', {held})"
        described = card(store.config, "owner/knn")
        assert f"| Keys | {len(store)} hidden states (`last_mlp`) of 32 numbers" in described
        assert "| Corpus | tides |\n| Licence of the corpus | MIT |" in described

    @pytest.mark.parametrize(
        "change",
        [
            {"entries": 7},
            {"entries": -1},
            {"dimension": "32"},
            {"layer": "none"},
            {"key_dtype": "object"},
            {"file": {"name": "../other", "size": 1, "sha256": ""}},
            {"file": {"name": "entries.safetensors", "size": 1, "sha256": ""}},
            {"format_version": 99},
            {"kind": "knowledge base"},
            {"more": 1},
        ],
    )
    def test_a_config_that_does_not_fit_is_refused(self, path, tmp_path, change):
        shutil.copytree(path, tmp_path, dirs_exist_ok=True)
        config = json.loads((path / "config.json").read_text())
        assert KnnDatastore(tmp_path).config == KnnDatastore(path).config
        (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(DatastoreError):
            KnnDatastore(tmp_path)

    def test_searches_have_a_number_of_threads_of_their_own_which_copies_keep(self, path):
        assert copy(KnnDatastore(path, threads=3)).search_threads == 3

    def test_the_model_of_the_keys_may_have_another_number_format(self, store, byte_llama, inputs):
        half = LlamaForCausalLM(byte_llama.config).to(torch.bfloat16).eval()
        half.load_state_dict(byte_llama.state_dict())
        assert generate(half, inputs, store, max_new_tokens=3).shape[1] > 3

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({}, "another model"),
            ({"hidden_size": 64}, r"hidden states of 32 numbers.* \(259, 64\)"),
            ({"vocab_size": 300}, "vocabulary of 259"),
        ],
    )
    def test_another_model_is_refused(self, store, changes, message):
        with pytest.raises(ValueError, match=message):
            store.check_model(other_model(**changes))


class TestSearch:
    def test_queries_that_are_not_finite_or_of_another_size_are_refused(self, store):
        with pytest.raises(ValueError, match="32 finite numbers"):
            store.search([np.full(32, np.nan, dtype=np.float32)], 1)
        with pytest.raises(ValueError, match="32 finite numbers"):
            store.search([np.zeros(31, dtype=np.float32)], 1)

    def test_next_entries_are_the_ten_after_each(self, store):
        last = len(store) - 1
        assert store.next_entries(np.array([3, 5])).tolist() == list(range(4, 16))
        assert store.next_entries(np.array([last - 1, last])).tolist() == [last]


class TestDamage:
    """Entries with the sizes and checksums of config.json, but impossible numbers."""

    @pytest.fixture
    def damaged(self, path, tmp_path):
        def write(name, change):
            shutil.copytree(path, tmp_path, dirs_exist_ok=True)
            array = load_file(path / "entries.safetensors")[name]
            change(array)
            rewrite(KnnDatastore(tmp_path), "file", **{name: array})
            return tmp_path

        return write

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -1])
    def test_a_length_that_cannot_be_is_refused(self, damaged, bad):
        folder = damaged("norms", lambda norms: norms.__setitem__(3, bad))
        with pytest.raises(DatastoreError, match=r"entries\.safetensors is damaged: a squared"):
            KnnDatastore(folder)

    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    @pytest.mark.parametrize("count", [1, 10**9])
    def test_keys_that_are_no_numbers_are_said_to_be_damaged(self, damaged, bad, count):
        store = KnnDatastore(damaged("keys", lambda keys: keys[:count].fill(bad)))
        query = np.zeros(store.config.dimension, np.float32)
        with pytest.raises(DatastoreError, match=r"is damaged: keys are not finite"):
            store.search([query], 1)


@pytest.mark.parametrize("architecture", ARCHITECTURES[:4], ids=str)
def test_the_last_mlp_is_found_in_many_architectures(architecture, models_by_type):
    model, ids = models_by_type(architecture.model_type), torch.tensor([[3, 5, 7]])
    with torch.no_grad():
        with recorded(model, "last_hidden") as last:
            model.base_model(ids, use_cache=False)
        with recorded(model, "last_mlp") as hidden:
            model.base_model(ids, use_cache=False)
    assert hidden.states.shape == last.states.shape == (1, 3, text_config(model).hidden_size)
    assert not torch.allclose(hidden.states, last.states)


def test_a_model_without_an_mlp_is_told_what_to_do(models_by_type):
    model = models_by_type("opt")
    expected = pytest.raises(ValueError, match='pass layer="last_hidden"')
    with expected, recorded(model, "last_mlp"):
        pass
