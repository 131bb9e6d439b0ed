"""The common behaviour of all retrievers: dense, exact or by a graph, and BM25."""

import sys

import numpy as np
import pytest

from hf_refspec.retrieval.bm25 import SparseRetriever
from hf_refspec.retrieval.dense import DenseRetriever
from hf_refspec.retrieval.retriever import Retriever
from tests.helpers.texts import TEXTS, bag_of_words, queries_of, some_texts

KINDS = {
    "flat": lambda base: DenseRetriever(base, bag_of_words),
    "hnsw": lambda base: DenseRetriever(base, bag_of_words, index="hnsw"),
    "bm25": lambda base: SparseRetriever(base),
}


@pytest.fixture(scope="module", params=KINDS)
def retriever(base, request):
    return KINDS[request.param](base)


def test_it_has_the_methods_and_the_passages(retriever):
    assert isinstance(retriever, Retriever)
    assert retriever.knowledge_base.tokenizer.decode(retriever.passage(7)) == TEXTS[7]


def test_what_is_found_depends_neither_on_the_batch_nor_on_how_many_are_wanted(retriever):
    queries = queries_of(retriever, some_texts(40, seed=2))
    for query, found in zip(queries, retriever.search(queries, 20), strict=True):
        np.testing.assert_array_equal(found.scores, retriever.score(query, found.ids))
        for k in (1, 5, 20):
            (alone,) = retriever.search([query], k)
            np.testing.assert_array_equal(alone.ids, found.ids[:k])
            np.testing.assert_array_equal(alone.scores, found.scores[:k])
    assert retriever.search([], 3) == []


@pytest.mark.parametrize(("kind", "library"), [("hnsw", "faiss"), ("bm25", "bm25s")])
def test_without_its_library_the_error_names_the_extra(base, monkeypatch, kind, library):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ImportError, match=r"hf_refspec\[retrieval\]"):
        KINDS[kind](base)
    assert len(KINDS["flat"](base).search([base.embeddings[0]], 3)[0]) == 3
