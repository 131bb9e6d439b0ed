"""Dense retrieval with Milvus, on an embedded file."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from texts import bag_of_words, some_texts

from hf_refspec.retrieval.dense import DenseRetriever
from hf_refspec.retrieval.knowledge_base import KnowledgeBase
from hf_refspec.retrieval.milvus import MilvusRetriever

pymilvus = pytest.importorskip("pymilvus")
pytest.importorskip("milvus_lite")

TEXTS = some_texts(250)
INDEXES = ["flat", "hnsw"]
logging.getLogger("pymilvus").setLevel(logging.CRITICAL)


@pytest.fixture(scope="module")
def base(tmp_path_factory, tokenizer):
    path = tmp_path_factory.mktemp("milvus") / "base"
    return KnowledgeBase.build(TEXTS, tokenizer, bag_of_words, path, progress=False)


@pytest.fixture(scope="module")
def other_base(tmp_path_factory, tokenizer):
    path = tmp_path_factory.mktemp("milvus") / "other"
    texts = some_texts(250, seed=9)
    return KnowledgeBase.build(texts, tokenizer, bag_of_words, path, progress=False)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return tmp_path_factory.mktemp("milvus") / "passages.db"


@pytest.fixture(scope="module")
def retrievers(base, file):
    made = {
        index: MilvusRetriever(base, bag_of_words, file, index=index, progress=False)
        for index in INDEXES
    }
    yield made
    for retriever in made.values():
        retriever.close()


@pytest.fixture(scope="module")
def queries():
    return list(bag_of_words(some_texts(6, seed=1)))


def test_flat_finds_what_faiss_finds(retrievers, base, queries):
    faiss = DenseRetriever(base, bag_of_words)
    for k in (1, 20, 250):
        found = retrievers["flat"].search(queries, k)
        for a, b in zip(found, faiss.search(queries, k), strict=True):
            np.testing.assert_array_equal(a.ids, b.ids)
            np.testing.assert_array_equal(a.scores, b.scores)


@pytest.mark.parametrize("index", INDEXES)
def test_scores_are_those_of_score_whatever_the_batch(retrievers, queries, index):
    retriever = retrievers[index]
    for query, found in zip(queries, retriever.search(queries, 10), strict=True):
        np.testing.assert_array_equal(found.scores, retriever.score(query, found.ids))
        (alone,) = retriever.search([query], 3)
        np.testing.assert_array_equal(alone.ids, found.ids[:3])


def test_all_queries_are_one_request(retrievers, queries, monkeypatch):
    retriever = retrievers["flat"]
    asked = []
    client = retriever._client
    search = client.search
    monkeypatch.setattr(
        client,
        "search",
        lambda *args, **options: asked.append(len(options["data"])) or search(*args, **options),
    )
    retriever.search(queries, 5)
    assert asked == [len(queries)]


def test_only_ids_and_vectors_are_in_the_collection(retrievers):
    retriever = retrievers["flat"]
    described = retriever._client.describe_collection(retriever.collection)
    assert [field["name"] for field in described["fields"]] == ["id", "embedding"]


def test_a_full_collection_is_not_filled_again(retrievers, base, file, queries, monkeypatch):
    monkeypatch.setattr(pymilvus.MilvusClient, "upsert", None)
    again = MilvusRetriever(base, bag_of_words, file, progress=False)
    assert again.collection == retrievers["flat"].collection
    assert [found.ids.tolist() for found in again.search(queries, 5)] == [
        found.ids.tolist() for found in retrievers["flat"].search(queries, 5)
    ]


def test_filling_that_was_interrupted_goes_on(tmp_path, tokenizer, queries, monkeypatch):
    texts = some_texts(4100, seed=5)  # more than two requests take
    base = KnowledgeBase.build(texts, tokenizer, bag_of_words, tmp_path / "base", progress=False)
    file = tmp_path / "passages.db"
    upsert = pymilvus.MilvusClient.upsert
    begun = []

    def interrupted(client, name, rows, **options):
        begun.append(rows[0]["id"])
        if len(begun) == 2:
            raise KeyboardInterrupt
        return upsert(client, name, rows, **options)

    monkeypatch.setattr(pymilvus.MilvusClient, "upsert", interrupted)
    options = {"collection": "interrupted", "progress": False}
    with pytest.raises(KeyboardInterrupt):
        MilvusRetriever(base, bag_of_words, file, **options)
    retriever = MilvusRetriever(base, bag_of_words, file, **options)
    assert begun == [0, 2000, 2000, 4000]
    expected = DenseRetriever(base, bag_of_words).search(queries, 20)
    for found, wanted in zip(retriever.search(queries, 20), expected, strict=True):
        np.testing.assert_array_equal(found.ids, wanted.ids)


def test_a_collection_with_other_vectors_is_refused(retrievers, other_base, file):
    name = retrievers["flat"].collection
    with pytest.raises(ValueError, match=f"collection '{name}' holds 250 other vectors"):
        MilvusRetriever(other_base, bag_of_words, file, collection=name)


def test_two_knowledge_bases_have_two_collections_in_one_file(
    retrievers, other_base, file, queries
):
    other = MilvusRetriever(other_base, bag_of_words, file, progress=False)
    assert other.collection != retrievers["flat"].collection
    expected = DenseRetriever(other_base, bag_of_words).search(queries, 5)
    for found, wanted in zip(other.search(queries, 5), expected, strict=True):
        np.testing.assert_array_equal(found.ids, wanted.ids)


@pytest.fixture
def server(tmp_path):
    """Starts a Milvus server in another process, at one address each time."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "milvus_lite", "server", "--data-dir", str(tmp_path / "data")]
    started = []

    def start():
        log = (tmp_path / "log").open("w")
        started.append(subprocess.Popen([*command, "--port", str(port)], stdout=log, stderr=log))
        for _ in range(300):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return started[-1]
            time.sleep(0.1)
        raise AssertionError((tmp_path / "log").read_text())

    yield f"http://127.0.0.1:{port}", start
    for process in started:
        process.kill()
        process.wait()


def test_a_server_that_restarts_is_waited_for_and_one_that_is_gone_is_an_error(
    base, queries, server
):
    uri, start = server
    process = start()
    retriever = MilvusRetriever(base, bag_of_words, uri, timeout=15, progress=False)
    expected = [found.ids.tolist() for found in retriever.search(queries, 5)]
    process.kill()
    process.wait()
    with ThreadPoolExecutor(1) as thread:
        search = thread.submit(retriever.search, queries, 5)
        process = start()
        assert [found.ids.tolist() for found in search.result()] == expected
    process.kill()
    process.wait()
    retriever._timeout = 0.5
    with pytest.raises(pymilvus.MilvusException):
        retriever.search(queries, 5)


def test_a_server_that_is_not_there_is_one_clear_error(base):
    with pytest.raises(OSError, match=r"Milvus at uri='http://127.0.0.1:1' cannot be used"):
        MilvusRetriever(base, bag_of_words, "http://127.0.0.1:1", timeout=2)


def test_a_collection_that_is_gone_is_an_error(base, file, queries):
    retriever = MilvusRetriever(base, bag_of_words, file, collection="dropped", progress=False)
    retriever._client.drop_collection("dropped")
    with pytest.raises(pymilvus.MilvusException):
        retriever.search(queries, 5)


def test_without_pymilvus_the_error_names_the_extra(base, file, monkeypatch):
    monkeypatch.setitem(sys.modules, "pymilvus", None)
    with pytest.raises(ImportError, match=r"hf_refspec\[milvus\]"):
        MilvusRetriever(base, bag_of_words, file)
