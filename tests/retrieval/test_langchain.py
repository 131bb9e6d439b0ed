"""Retrievers of LangChain."""

from __future__ import annotations

import numpy as np
import pytest
from texts import some_texts

from hf_refspec.retrieval.langchain import from_langchain
from hf_refspec.retrieval.retriever import Retriever

pytest.importorskip("langchain_core")
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.retrievers import BaseRetriever
from langchain_core.vectorstores import InMemoryVectorStore

TEXTS = list(dict.fromkeys(some_texts(40)))


class Overlap(BaseRetriever):
    """Ranks texts by the words that they share with the query."""

    texts: list[str]
    k: int = 10

    def _get_relevant_documents(self, query, *, run_manager):
        words = set(query.split())
        ranked = sorted(self.texts, key=lambda text: -len(words & set(text.split())))
        return [Document(page_content=text) for text in ranked[: self.k]]


@pytest.fixture
def retriever(tokenizer):
    return from_langchain(Overlap(texts=TEXTS), tokenizer)


def query_of(retriever, tokenizer, text):
    return retriever.encode(np.array(tokenizer(text, add_special_tokens=False)["input_ids"]))


def texts_of(retriever, tokenizer, found):
    return [tokenizer.decode(retriever.passage(i)) for i in found.ids]


def test_it_is_a_retriever(retriever):
    assert isinstance(retriever, Retriever)


def test_passages_are_the_documents_in_their_order_scored_by_rank(retriever, tokenizer):
    query = query_of(retriever, tokenizer, "river stone light")
    (found,) = retriever.search([query], 4)
    expected = [document.page_content for document in Overlap(texts=TEXTS).invoke(query.text)]
    assert texts_of(retriever, tokenizer, found) == expected[:4]
    np.testing.assert_allclose(found.scores, [1, 1 / 2, 1 / 3, 1 / 4])
    assert retriever.passage(found.ids[0]).dtype == np.int64


def test_a_batch_finds_what_each_query_finds_with_the_same_ids_in_another_process(
    retriever, tokenizer
):
    queries = [query_of(retriever, tokenizer, text) for text in some_texts(8, seed=1)]
    fresh = from_langchain(Overlap(texts=TEXTS), tokenizer)
    for query, found in zip(queries, retriever.search(queries, 5), strict=True):
        (alone,) = fresh.search([query], 5)
        assert alone.ids.tolist() == found.ids.tolist()
    assert retriever.search([], 5) == []


def test_a_vector_store_of_langchain_works(tokenizer):
    store = InMemoryVectorStore.from_texts(TEXTS, DeterministicFakeEmbedding(size=16))
    retriever = from_langchain(store.as_retriever(search_kwargs={"k": 6}), tokenizer)
    queries = [query_of(retriever, tokenizer, text) for text in TEXTS[:3]]
    for text, found in zip(TEXTS, retriever.search(queries, 20), strict=False):
        assert len(found) == 6
        assert texts_of(retriever, tokenizer, found)[0] == text


def test_score_ranks_the_passage_that_is_most_like_the_query_first(tokenizer):
    texts = ["aaaa bbbb", "zzzz yyyy", "aaaa zzzz"]
    retriever = from_langchain(Overlap(texts=texts), tokenizer)
    queries = [query_of(retriever, tokenizer, text) for text in ("zzzz yyyy", "aaaa bbbb")]
    (found, _) = retriever.search(queries, 3)
    for query, best in zip(queries, (1, 0), strict=True):
        scores = retriever.score(query, found.ids)
        assert scores.dtype == np.float32
        assert texts_of(retriever, tokenizer, found)[int(scores.argmax())] == texts[best]
        np.testing.assert_array_equal(retriever.score(query, found.ids[1:]), scores[1:])


def test_repeated_and_empty_documents_are_left_out(tokenizer):
    nothing = from_langchain(Overlap(texts=[]), tokenizer)
    assert len(nothing.search([query_of(nothing, tokenizer, "tree")], 4)[0]) == 0
    retriever = from_langchain(Overlap(texts=["tree", "", "tree", "stone"]), tokenizer)
    (found,) = retriever.search([query_of(retriever, tokenizer, "tree")], 4)
    assert texts_of(retriever, tokenizer, found) == ["tree", "stone"]


def test_the_query_is_the_text_without_special_tokens(retriever, tokenizer):
    ids = np.array([tokenizer.bos_token_id, *tokenizer("tree", add_special_tokens=False).input_ids])
    assert retriever.encode(ids).text == "tree"


def test_an_unknown_passage_is_a_key_error(retriever):
    with pytest.raises(KeyError):
        retriever.passage(5)


@pytest.mark.parametrize("wrong", [None, "retriever", Overlap, InMemoryVectorStore])
def test_what_is_no_retriever_is_refused(tokenizer, wrong):
    with pytest.raises(TypeError, match="retriever must be a LangChain retriever"):
        from_langchain(wrong, tokenizer)


def test_a_slow_tokenizer_is_refused():
    with pytest.raises(ValueError, match="tokenizer must be a fast one"):
        from_langchain(Overlap(texts=TEXTS), object())
