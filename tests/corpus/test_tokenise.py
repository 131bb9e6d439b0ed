"""Threads that tokenise keep the order, and end with whom they work for; a real Ray makes the same
bytes."""

from __future__ import annotations

import os
import random
import sys
import threading

import datasets
import numpy as np
import pytest
from stored import content_of

from hf_refspec.store.build.engine import LONGEST_PIECE, encode, open_engine, pieces
from hf_refspec.store.datastore import Datastore
from hf_refspec.store.datastore_config import StoreConfig
from hf_refspec.store.stored_tokenizer import load_backend


def engine(tokenizer, threads: int):
    return open_engine("local", threads, StoreConfig("", "", 259), tokenizer)


@pytest.mark.parametrize("threads", [1, 3])
def test_documents_come_in_order(tokenizer, threads):
    texts = [str(i) * (i % 90 * 60) for i in range(300)]
    with engine(tokenizer, threads) as opened:
        batches = list(opened.tokenize(texts))
    assert len(batches) > 3
    tokens = np.concatenate([tokens for _, tokens in batches])
    documents = np.split(tokens, np.flatnonzero(tokens == 65535))
    texts_there = [tokenizer.decode(each[each != 65535]) for each in documents]
    assert texts_there[:-1] == [text for text in texts if text]


def test_the_pieces_of_a_long_text_are_one_document(tokenizer):
    texts = ["ab\n" * 400_000, "c" * LONGEST_PIECE, "", "d"]
    with engine(tokenizer, 3) as opened:
        lengths, tokens = map(np.concatenate, zip(*opened.tokenize(texts), strict=True))
    assert lengths.tolist() == [1_200_001, LONGEST_PIECE + 1, 0, 2]
    documents = np.split(tokens, np.flatnonzero(tokens == 65535) + 1)[:-1]
    assert [tokenizer.decode(ids[:-1]) for ids in documents] == [texts[0], texts[1], "d"]


def test_who_takes_no_more_leaves_no_thread(tokenizer):
    before, read = threading.active_count(), []

    def endless():
        while True:
            read.append(1)
            yield "x" * 100_000

    with engine(tokenizer, 2) as opened:
        next(opened.tokenize(endless()))
    assert threading.active_count() == before and len(read) < 100


QUIET = {"progress": False, "num_proc": 1, "shard_tokens": 500}
_WORDS = random.Random(0)
TEXTS = [" ".join(_WORDS.choices(["a", "bc", "", "é\n"], k=i % 50)) for i in range(90)]


@pytest.fixture(scope="module")
def ray():
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install hf_refspec[ray]")
    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100_000_000)
    yield ray
    ray.shutdown()


def test_the_same_bytes_as_from_the_local_engine(ray, tmp_path, tokenizer):
    dataset = datasets.Dataset.from_dict({"text": TEXTS})
    stream = dataset.to_iterable_dataset(num_shards=5)
    local = Datastore.build(TEXTS, tokenizer, tmp_path / "local", **QUIET).path
    Datastore(local).add(TEXTS[:40], tokenizer, **QUIET)
    options = {**QUIET, "engine": "ray", "num_proc": None}
    for name, source in (("texts", TEXTS), ("stream", stream)):
        path = Datastore.build(source, tokenizer, tmp_path / name, **options).path
        Datastore(path).add(TEXTS[:40], tokenizer, **options)
        assert content_of(path) == content_of(local)
    assert ray.is_initialized()  # It was not started by the build.


def test_without_ray_it_is_told_what_to_install(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r'pip install "hf_refspec\[ray\]"'):
        Datastore.build(["a"], tokenizer, tmp_path / "store", **{**QUIET, "engine": "ray"})
    assert not list(tmp_path.iterdir())


def test_a_long_text_is_cut_at_line_ends(tokenizer):
    text = "one\ntwo\nthree-four-five-six\n\nseven\n"
    parts = list(pieces(text, 8))
    assert "".join(parts) == text and max(map(len, parts)) <= 8
    assert parts[0] == "one\ntwo\n"
    text *= LONGEST_PIECE // len(text) + 1
    assert len(list(pieces(text))) == 2
    backend = load_backend(tokenizer.backend_tokenizer.to_str())
    lengths, tokens = encode(backend, ["", text], np.dtype(np.uint16), 65535)
    assert lengths.tolist() == [0, len(text) + 1]
    assert tokenizer.decode(tokens[:-1]) == text and tokens[-1] == 65535


def test_the_tokenizers_own_truncation_and_special_tokens_do_not_count(tokenizer):
    content = tokenizer.backend_tokenizer
    content.enable_truncation(4)
    content.enable_padding(length=9)
    try:
        backend = load_backend(content.to_str())
    finally:
        content.no_truncation()
        content.no_padding()
    lengths, _ = encode(backend, ["eight chars", "a"], np.dtype(np.uint16), 65535)
    assert lengths.tolist() == [12, 2]
