"""Similar prompts are found; an encoder that fails only loses that."""

from __future__ import annotations

import logging
import sys

import numpy as np
import pytest
import torch

from hf_refspec.drafting.sessions import similar_calls
from hf_refspec.drafting.sessions.memory import Memory
from hf_refspec.drafting.sessions.similar_calls import SimilarCalls, as_encode, mean_embedding

pytest.importorskip("faiss")


def given(vectors) -> SimilarCalls:
    """An encoder that gives one vector after another."""
    each = iter(vectors)

    def encode(ids):
        vector = next(each)
        if isinstance(vector, Exception):
            raise vector
        return vector

    return using(encode)


def using(encode) -> SimilarCalls:
    similar = SimilarCalls()
    similar.use(encode, Memory(100))
    return similar


def test_finds_what_an_exact_search_finds(monkeypatch):
    monkeypatch.setattr(similar_calls, "_BLOCK", 8)
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((50, 5)).astype(np.float32)
    similar = using(lambda ids: vectors[ids[0]])
    for number in range(50):
        similar.add(number, similar.vector(np.array([number])))
        query = rng.standard_normal((1, 5)).astype(np.float32)
        best = np.argsort(-(vectors[: number + 1] @ query[0]), kind="stable")[:4]
        assert similar.search(query, 4) == best.tolist()
    similar.forget(20)  # the first two blocks are full of older ones
    best = 16 + np.argsort(-(vectors[16:] @ query[0]), kind="stable")
    assert similar.search(query, 4) == best[:4].tolist()


def test_nothing_to_find():
    similar = given([[1.0, 0.0]])
    assert similar.search(similar.vector(np.array([1])), 3) == []
    similar.forget(5)


@pytest.mark.parametrize(
    "bad",
    [
        np.ones((1, 3)),
        np.float32(1),
        [1.0, 2.0],
        [],
        [1.0, np.nan, 0.0],
        [np.inf, 0.0, 0.0],
        "text",
        None,
        RuntimeError("the service is down"),
    ],
)
def test_a_bad_vector_is_warned_of_once(bad, caplog):
    similar = given([[1.0, 2.0, 3.0], bad, bad, torch.tensor([1.0, 0.0, 0.0])])
    prompt = np.array([1])
    with caplog.at_level(logging.WARNING):
        assert similar.vector(prompt).shape == (1, 3)
        assert similar.vector(prompt) is None
        assert similar.vector(prompt) is None
        assert similar.vector(prompt).tolist() == [[1.0, 0.0, 0.0]]
    assert caplog.text.count("without similar calls") == 1


def test_the_mean_of_the_input_embeddings(byte_llama):
    ids = np.array([5, 9, 9])
    weight = byte_llama.get_input_embeddings().weight.detach().numpy()
    mean = weight[ids].mean(0)
    vector = mean_embedding(byte_llama)(ids)
    np.testing.assert_allclose(vector, mean / np.linalg.norm(mean), rtol=1e-5)


def test_a_long_prompt(byte_llama, monkeypatch):
    encode, ids = mean_embedding(byte_llama), np.arange(3, 100)
    whole = encode(ids)
    monkeypatch.setattr(similar_calls, "_PART", 10)
    np.testing.assert_allclose(encode(ids), whole, rtol=1e-5)


class Sentences:
    """As a SentenceTransformer: callable, but meant to encode text."""

    def __call__(self, features):
        raise AssertionError

    def encode(self, text):
        assert isinstance(text, str)
        return np.array([len(text), 1.0])


def test_an_encoder_of_text(tokenizer):
    encode = as_encode(Sentences(), tokenizer)
    ids = np.array(tokenizer("four")["input_ids"])
    assert encode(ids).tolist() == [4.0, 1.0]
    with pytest.raises(ValueError, match="tokenizer="):
        as_encode(Sentences(), None)
    with pytest.raises(TypeError, match="encoder must be"):
        as_encode("all-MiniLM", tokenizer)


def test_without_faiss(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "faiss", None)
    with caplog.at_level(logging.WARNING):
        similar = using(lambda ids: [1.0])
    assert "pip install hf_refspec[retrieval]" in caplog.text
    assert similar.vector(np.array([1])) is None
