"""The retrievers of the examples fulfil the protocol."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest
from texts import bag_of_words, some_texts

import hf_refspec as rs

EXAMPLES = Path(__file__).parents[2] / "examples"
QUERIES = some_texts(6, seed=1)


def tokens(tokenizer, text):
    return np.array(tokenizer(text, add_special_tokens=False)["input_ids"])


def test_milvus_finds_what_exact_search_finds_whatever_the_batch(tmp_path, tokenizer):
    pytest.importorskip("milvus_lite")
    new = runpy.run_path(str(EXAMPLES / "milvus_retriever.py"))["MilvusRetriever"]
    texts = some_texts(250)
    base = rs.KnowledgeBase.build(texts, tokenizer, bag_of_words, tmp_path / "b", progress=False)
    exact = rs.DenseRetriever(base, bag_of_words)
    for _ in range(2):  # the second time the collection is there
        milvus = new(base, bag_of_words, str(tmp_path / "passages.db"))
        assert isinstance(milvus, rs.Retriever)
        queries = [milvus.encode(tokens(tokenizer, text)) for text in QUERIES]
        expected = exact.search(queries, 20)
        for query, found, wanted in zip(queries, milvus.search(queries, 20), expected, strict=True):
            np.testing.assert_array_equal(found.ids, wanted.ids)
            (alone,) = milvus.search([query], 5)
            np.testing.assert_array_equal(alone.scores, found.scores[:5])
            np.testing.assert_array_equal(found.scores, milvus.score(query, found.ids))
        milvus.client.close()
    assert milvus.search([], 5) == []


def test_langchain_gets_ids_and_scores_by_rank(tokenizer):
    pytest.importorskip("langchain_core")
    from langchain_core.documents import Document
    from langchain_core.retrievers import BaseRetriever

    class Overlap(BaseRetriever):
        """Ranks texts by the words that they share with the query."""

        def _get_relevant_documents(self, query, *, run_manager):
            words = set(query.split())
            texts = ["tree river", "tree stone", "", "tree stone", "music"]
            ranked = sorted(texts, key=lambda text: -len(words & set(text.split())))
            return [Document(page_content=text) for text in ranked]

    new = runpy.run_path(str(EXAMPLES / "langchain_retriever.py"))["LangChainRetriever"]
    retriever = new(Overlap(), tokenizer)
    assert isinstance(retriever, rs.Retriever)
    queries = [retriever.encode(tokens(tokenizer, text)) for text in ("tree stone", "music")]
    first, second = retriever.search(queries, 3)
    ranked = [tokenizer.decode(retriever.passage(i)) for i in first.ids]
    assert ranked == ["tree stone", "tree river", "music"]  # none twice, none empty
    np.testing.assert_allclose(first.scores, [1, 1 / 2, 1 / 3])
    assert tokenizer.decode(retriever.passage(second.ids[0])) == "music"
    for query, best in zip(queries, (0, 2), strict=True):
        assert retriever.score(query, first.ids).argmax() == best
    (alone,) = new(Overlap(), tokenizer).search(queries[1:], 3)
    assert alone.ids.tolist() == second.ids.tolist()
