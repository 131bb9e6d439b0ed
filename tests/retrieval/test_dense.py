"""Dense retrieval: exact search, the graph, ties, scores, and bad embeddings."""

import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertModel

from hf_refspec.retrieval.dense import DenseRetriever
from hf_refspec.retrieval.knowledge_base import KnowledgeBase
from hf_refspec.store.files import DatastoreError
from tests.helpers.stored import rewrite
from tests.helpers.texts import TEXTS, bag_of_words, queries_of, some_texts


@pytest.fixture(scope="module")
def flat(base):
    return DenseRetriever(base, bag_of_words)


def test_the_query_is_the_text_of_the_tokens_without_special_ones(flat):
    tokenizer = flat.knowledge_base.tokenizer
    ids = [tokenizer.bos_token_id, *tokenizer(TEXTS[0], add_special_tokens=False)["input_ids"]]
    np.testing.assert_array_equal(flat.encode(np.array(ids)), bag_of_words([TEXTS[0]])[0])


def test_searches_have_a_number_of_threads_of_their_own(base, flat):
    queries = queries_of(flat, some_texts(5, seed=3))
    expected = [found.ids.tolist() for found in flat.search(queries, 7)]
    assert flat.search_threads == torch.get_num_threads()
    for threads in (1, 3):
        retriever = DenseRetriever(base, bag_of_words, threads=threads)
        assert retriever.search_threads == threads
        assert [found.ids.tolist() for found in retriever.search(queries, 7)] == expected
    assert DenseRetriever(base, bag_of_words, "hnsw").search_threads == 1


def test_a_graph_that_is_walked_for_all_finds_what_exact_search_does(base, flat):
    queries = queries_of(flat, some_texts(40, seed=3))
    walked = {
        each: DenseRetriever(base, bag_of_words, "hnsw", ef_search=each).search(queries, 1)
        for each in (1, 400)
    }
    expected = [found.ids.tolist() for found in flat.search(queries, 1)]
    found = {each: [found.ids.tolist() for found in walked[each]] for each in walked}
    assert found[400] == expected != found[1]


def test_it_is_searched_and_scored_at_the_same_time(flat):
    queries = queries_of(flat, some_texts(8, seed=4))
    expected = flat.search(queries, 5)
    with ThreadPoolExecutor(2) as threads:
        running = [threads.submit(flat.search, queries, 5) for _ in range(20)]
        for query, found in zip(queries, expected, strict=True):
            np.testing.assert_array_equal(flat.score(query, found.ids), found.scores)
        for search in running:
            for found, again in zip(expected, search.result(), strict=True):
                np.testing.assert_array_equal(found.ids, again.ids)


def test_other_dimensions_and_missing_embeddings_are_refused(base, tmp_path, tokenizer):
    retriever = DenseRetriever(base, lambda texts: bag_of_words(texts)[:, :8])
    with pytest.raises(ValueError, match="dimension 8, but the knowledge base has vectors of 24"):
        retriever.encode(np.array([40]))
    bare = KnowledgeBase.build(TEXTS[:3], tokenizer, None, tmp_path / "base")
    with pytest.raises(ValueError, match="knowledge_base has no embeddings"):
        DenseRetriever(bare, bag_of_words)


def test_embeddings_that_became_nan_are_refused(tmp_path, tokenizer):
    base = KnowledgeBase.build(TEXTS, tokenizer, bag_of_words, tmp_path / "base")
    embeddings = np.array(base.embeddings)
    embeddings[-1, -1] = np.nan
    rewrite(base, "embeddings_file", embeddings=embeddings)
    with pytest.raises(DatastoreError, match=r"embedding of passage 399 of .* is NaN"):
        DenseRetriever(KnowledgeBase(base.path, tokenizer), bag_of_words)


class TellsQueriesApart:
    """An encoder with the methods of a SentenceTransformer."""

    def encode_document(self, texts, show_progress_bar, convert_to_numpy):
        return bag_of_words(texts)

    def encode_query(self, texts, show_progress_bar, convert_to_numpy):
        return -bag_of_words(texts)

    def encode(self, texts, **options):
        raise AssertionError("it knows what is a query")


def test_queries_and_passages_are_encoded_as_the_model_has_it(tmp_path, tokenizer):
    encoder = TellsQueriesApart()
    base = KnowledgeBase.build(TEXTS, tokenizer, encoder, tmp_path / "base")
    np.testing.assert_array_equal(base.embeddings, bag_of_words(TEXTS))
    (query,) = queries_of(DenseRetriever(base, encoder), ["tree"])
    np.testing.assert_array_equal(query, -bag_of_words(["tree"])[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_encoder_may_return_tensors_of_any_type(tmp_path, tokenizer, dtype):
    def encoder(texts):
        return torch.from_numpy(bag_of_words(texts)).to(dtype)

    base = KnowledgeBase.build(TEXTS, tokenizer, encoder, tmp_path / "base")
    expected = torch.from_numpy(bag_of_words(TEXTS)).to(dtype).float().numpy()
    np.testing.assert_array_equal(base.embeddings, expected)


def test_an_encoder_can_be_named(tmp_path, tokenizer):
    modules = pytest.importorskip("sentence_transformers.models")
    from sentence_transformers import SentenceTransformer

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    bert = BertModel(BertConfig(vocab_size=259, intermediate_size=24, **sizes))
    bert.save_pretrained(tmp_path / "bert")
    tokenizer.save_pretrained(tmp_path / "bert")
    words = modules.Transformer(str(tmp_path / "bert"), max_seq_length=32)
    encoder = SentenceTransformer(modules=[words, modules.Pooling(16)], device="cpu")
    named = tmp_path / "named"
    encoder.save(str(named))
    base = KnowledgeBase.build(TEXTS[:9], tokenizer, named, tmp_path / "base")
    assert base.config.source["encoder"] == "named"
    np.testing.assert_allclose(base.embeddings, encoder.encode(TEXTS[:9]), atol=1e-5)
    retriever = DenseRetriever(base, str(named))
    (query,) = queries_of(retriever, ["tree"])
    np.testing.assert_allclose(query, encoder.encode("tree"), atol=1e-5)


def test_an_encoder_that_is_nowhere_is_refused_before_work_starts(tmp_path, tokenizer):
    pytest.importorskip("sentence_transformers")
    missing = tmp_path / "missing"
    with pytest.raises(FileNotFoundError, match=f"{missing}' does not exist"):
        KnowledgeBase.build(TEXTS, tokenizer, missing, tmp_path / "base")
    assert list(tmp_path.iterdir()) == []


def test_without_sentence_transformers_the_error_names_the_package(base, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(ImportError, match=r"encoder org/name .* pip install .*retrieval"):
        DenseRetriever(base, "org/name")
