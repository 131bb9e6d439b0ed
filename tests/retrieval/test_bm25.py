"""Sparse retrieval: the scores of bm25s, in batches, with ties by id."""

import bm25s
import numpy as np
import pytest

from hf_refspec.retrieval.bm25 import SparseRetriever
from hf_refspec.retrieval.knowledge_base import KnowledgeBase
from tests.helpers.texts import some_texts

# More than are scored at once.
TEXTS = [*some_texts(1000, words=9), *some_texts(30, words=2), "tree"]


@pytest.fixture(scope="module")
def retriever(tmp_path_factory, tokenizer):
    path = tmp_path_factory.mktemp("sparse") / "base"
    base = KnowledgeBase.build(TEXTS, tokenizer, None, path)
    return SparseRetriever(base)


def query_of(retriever, text):
    ids = retriever.knowledge_base.tokenizer(text, add_special_tokens=False)["input_ids"]
    return retriever.encode(np.array(ids))


def ranking(retriever, query):
    ids = np.arange(len(retriever.knowledge_base))
    return np.lexsort((ids, -retriever.score(query, ids)))


def test_scores_are_those_of_bm25s(retriever):
    base = retriever.knowledge_base
    passages = [base.passage(i).tolist() for i in range(len(base))]
    reference = bm25s.BM25(method="lucene")
    vocabulary = {str(i): i for i in range(base.config.vocab_size)}
    reference.index((passages, vocabulary), show_progress=False)
    for text in some_texts(10, seed=1):
        ids = base.tokenizer(text, add_special_tokens=False)["input_ids"]
        expected = reference.get_scores_from_ids(ids)
        scores = retriever.score(query_of(retriever, text), np.arange(len(base)))
        assert scores.dtype == np.float32
        np.testing.assert_allclose(scores, expected, rtol=1e-5)


@pytest.mark.parametrize("k", [1, 7, 1031, 2000])
def test_the_best_of_all_are_found_with_the_scores_of_score(retriever, k):
    queries = [query_of(retriever, text) for text in some_texts(6, seed=2)]
    for query, found in zip(queries, retriever.search(queries, k), strict=True):
        np.testing.assert_array_equal(found.ids, ranking(retriever, query)[:k])
        np.testing.assert_array_equal(found.scores, retriever.score(query, found.ids))


@pytest.mark.parametrize("ids", [[], [0], [-1, 10**6], [258]])
def test_a_query_that_no_passage_has_finds_the_first_ones_with_nothing(retriever, ids):
    query = retriever.encode(np.array(ids, np.int64))
    (found,) = retriever.search([query], 3)
    assert found.ids.tolist() == [0, 1, 2]
    assert found.scores.tolist() == [0, 0, 0]


def test_a_token_that_is_asked_twice_counts_twice(retriever):
    ids = np.arange(len(TEXTS))
    once, twice = (retriever.score(query_of(retriever, text), ids) for text in ("e", "ee"))
    np.testing.assert_allclose(twice, 2 * once)
