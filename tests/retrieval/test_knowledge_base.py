"""Knowledge bases: building, opening, and the Hub."""

import json
import pickle
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file
from transformers import PreTrainedTokenizerFast

from hf_refspec.retrieval.knowledge_base import KnowledgeBase
from hf_refspec.store.datastore import Datastore
from hf_refspec.store.files import DatastoreError
from hf_refspec.store.hub import card
from tests.helpers.stored import rewrite
from tests.helpers.texts import DIMENSION, bag_of_words, some_texts


def build(path, tokenizer, documents=None, encoder=bag_of_words, **options):
    documents = some_texts(30) if documents is None else documents
    return KnowledgeBase.build(documents, tokenizer, encoder, path, **options)


@pytest.fixture
def base(tmp_path, tokenizer):
    return build(tmp_path / "base", tokenizer, chunk_length=64)


def test_passages_are_the_documents_in_order_with_their_embeddings(base):
    texts = some_texts(30)
    assert len(base) == 30
    held = f"passages=30, dimension={base.config.dimension}"
    tokenizer = f"tokenizer={base.config.tokenizer!r}"
    assert repr(base) == f"KnowledgeBase('{base.path}', {held}, {tokenizer})"
    assert [base.text(i) for i in range(30)] == texts
    np.testing.assert_array_equal(base.embeddings, bag_of_words(texts))
    assert base.embeddings.dtype == np.float32
    assert base.passage(3).dtype == np.int64
    for passage_id in (-1, 30):
        with pytest.raises(ValueError):
            base.passage(passage_id)
    assert f"of {DIMENSION} numbers, by the encoder bag_of_words" in card(base.config, "o/p")


def test_a_long_document_is_cut_into_passages_of_about_the_same_length(tmp_path, tokenizer):
    texts = ["abcdefghij" * 10 + "xyz", "", "x" * 80, "short"]
    base = build(tmp_path / "base", tokenizer, texts, chunk_length=40)
    assert [len(base.passage(i)) for i in range(len(base))] == [35, 34, 34, 40, 40, 5]
    assert "".join(base.text(i) for i in range(len(base))) == "".join(texts)


def test_without_an_encoder_there_are_no_embeddings(tmp_path, tokenizer):
    base = build(tmp_path / "base", tokenizer, encoder=None)
    assert base.embeddings is None
    assert sorted(file.name for file in base.path.iterdir()) == [
        "config.json",
        "passages.safetensors",
    ]
    assert "SparseRetriever" in card(base.config, "owner/passages")


def test_a_copy_and_a_saved_one_are_the_same(base, tmp_path, tokenizer):
    base.save_pretrained(tmp_path / "saved")
    saved = KnowledgeBase.from_pretrained(tmp_path / "saved", tokenizer)
    for other in (saved, pickle.loads(pickle.dumps(base))):
        assert [other.text(i) for i in range(len(other))] == some_texts(30)
        np.testing.assert_array_equal(other.embeddings, base.embeddings)
    with pytest.raises(FileExistsError):
        base.save_pretrained(tmp_path / "saved")


def nan_for_some(texts):
    vectors = bag_of_words(texts)
    vectors[3, 1] = np.nan
    return vectors


def raises(texts):
    raise MemoryError("no room")


def changing(texts):
    return bag_of_words(texts)[:, : 23 if len(texts) == 512 else 22]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        *(({"documents": none}, ValueError, "documents has no token") for none in ([], ["", ""])),
        ({"encoder": nan_for_some}, ValueError, "must return finite numbers"),
        ({"encoder": raises}, MemoryError, "no room"),
        ({"encoder": lambda texts: bag_of_words(texts)[:5]}, ValueError, r"of the shape \(30, d\)"),
        ({"encoder": changing, "documents": ["word"] * 600}, ValueError, "numbers instead of"),
    ],
)
def test_a_build_that_fails_says_why_and_leaves_nothing(
    tmp_path, tokenizer, options, error, message
):
    with pytest.raises(error, match=message):
        build(tmp_path / "base", tokenizer, **options)
    assert not list(tmp_path.iterdir())


def test_what_it_was_not_made_for_is_refused(base, tmp_path, tokenizer):
    other = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    other.add_tokens(["<other>"])
    with pytest.raises(DatastoreError, match="made for another tokenizer"):
        KnowledgeBase(base.path, other)
    store = Datastore.build(some_texts(3), tokenizer, tmp_path / "store")
    with pytest.raises(DatastoreError, match="of the kind 'datastore', not 'knowledge base'"):
        KnowledgeBase(store.path, tokenizer)
    with pytest.raises(DatastoreError):
        Datastore(base.path)


BOUNDS = {
    "first": lambda bounds: [1, *bounds[1:]],
    "order": lambda bounds: [*bounds[:4], bounds[5], bounds[4], *bounds[6:]],
    "empty": lambda bounds: [*bounds[:4], bounds[5], *bounds[5:]],
    "long": lambda bounds: [bounds[0], *(bounds[4] - np.array([3, 2, 1])), *bounds[4:]],
    "last": lambda bounds: [*bounds[:-1], bounds[-1] + 1],
}


@pytest.mark.parametrize("change", BOUNDS.values(), ids=BOUNDS)
def test_bounds_that_are_none_are_refused(base, tokenizer, change):
    bounds = change(load_file(base.path / "passages.safetensors")["bounds"])
    rewrite(base, "passages_file", bounds=np.array(bounds, np.int64))
    with pytest.raises(DatastoreError, match="bounds do not cut it into passages of 1 to 64"):
        KnowledgeBase(base.path, tokenizer)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("passages", 31),
        ("passages", 0),
        ("tokens", 7),
        ("dimension", 25),
        ("dimension", 0),
        ("dimension", -1),
        ("chunk_length", "long"),
        ("vocab_size", 2**31),
        ("kind", "datastore"),
        ("format_version", 2),
        ("source", []),
        ("passages_file", {"name": "../secret.safetensors", "size": 1, "sha256": ""}),
        ("embeddings_file", None),
    ],
)
def test_a_config_that_is_not_true_is_refused(base, tokenizer, key, value):
    path = base.path / "config.json"
    content = json.loads(path.read_text())
    for change in ({key: value}, None):
        changed = content | change if change else {k: v for k, v in content.items() if k != key}
        path.write_text(json.dumps(changed))
        with pytest.raises(DatastoreError):
            KnowledgeBase(base.path, tokenizer)


def test_a_token_beyond_the_vocabulary_is_refused_when_it_is_read(base, tokenizer):
    tokens = load_file(base.path / "passages.safetensors")["tokens"]
    tokens[2] = 60_000
    rewrite(base, "passages_file", tokens=tokens)
    damaged = KnowledgeBase(base.path, tokenizer)
    assert damaged.text(1) == some_texts(30)[1]
    with pytest.raises(DatastoreError, match="passage 0 has the token 60000"):
        damaged.passage(0)


def test_a_vocabulary_larger_than_the_tokenizers_is_refused(base, tokenizer):
    # BM25 would take memory for every id.
    replace(base.config, vocab_size=2**16).write(base.path)
    message = rf"{base.path} is damaged: its vocab_size is 65536, but its tokenizer has 259 ids"
    with pytest.raises(DatastoreError, match=message):
        KnowledgeBase(base.path, tokenizer)
