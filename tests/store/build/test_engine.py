"""Threads that tokenise keep the order, and end with whom they work for."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from hf_refspec.store.build.engine import LocalEngine
from hf_refspec.store.datastore_config import StoreConfig


def engine(tokenizer, threads: int) -> LocalEngine:
    content = tokenizer.backend_tokenizer.to_str()
    return LocalEngine(content, StoreConfig("", "", 259), threads)


def test_a_tokenizer_that_fails_is_told():
    broken = LocalEngine("no tokenizer", StoreConfig("", "", 259), 2)
    with pytest.raises(Exception, match="expected"):
        list(broken.tokenize(iter([[5]])))


@pytest.mark.parametrize("threads", [1, 3])
def test_documents_come_in_order(tokenizer, threads):
    texts = [str(i) * (i % 90 * 60) for i in range(300)]
    batches = list(engine(tokenizer, threads).tokenize(iter(texts)))
    assert len(batches) > 3
    tokens = np.concatenate([tokens for _, tokens in batches])
    documents = np.split(tokens, np.flatnonzero(tokens == 65535))
    texts_there = [tokenizer.decode(each[each != 65535]) for each in documents]
    assert texts_there[:-1] == [text for text in texts if text]


def test_who_takes_no_more_leaves_no_thread(tokenizer):
    before = threading.active_count()
    read = []

    def endless():
        while True:
            read.append(1)
            yield "x" * 100_000

    tokens = engine(tokenizer, 2).tokenize(endless())
    next(tokens)
    tokens.close()
    assert threading.active_count() == before and len(read) < 100
