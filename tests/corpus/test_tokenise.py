"""Documents are tokenised in order, in pieces, as they are."""

import threading
from contextlib import closing

import numpy as np
import pytest

from hf_refspec.corpus.tokenise import LONGEST_PIECE, tokenised
from tests.helpers.byte_model import word_tokenizer


def ids_of(texts, tokenizer, threads: int = 1):
    return tokenised(texts, tokenizer, np.dtype(np.uint16), threads)


@pytest.mark.parametrize("threads", [1, 3])
def test_documents_come_in_order(tokenizer, threads):
    texts = [str(i) * (i % 90 * 60) for i in range(300)]
    assert [tokenizer.decode(ids) for ids in ids_of(texts, tokenizer, threads)] == texts


def test_the_pieces_of_a_long_text_are_one_document(tokenizer):
    texts = ["ab\n" * 400_000, "c" * LONGEST_PIECE, "", "d" * (LONGEST_PIECE + 1), "e"]
    assert [tokenizer.decode(ids) for ids in ids_of(texts, tokenizer, 3)] == texts


def test_a_long_text_is_cut_at_line_ends():
    text = "two words\n" * (LONGEST_PIECE // 8)
    [ids] = ids_of([text], word_tokenizer(["?", "two", "words"]))
    assert ids.tolist() == [1, 2] * (LONGEST_PIECE // 8)  # none is cut


def test_ids_stay_as_they_are(tokenizer):
    documents = [np.array([5, 6]), "a", np.array([], np.int64)]
    read = list(ids_of(documents, tokenizer))
    assert [ids.tolist() for ids in read[::2]] == [[5, 6], []]
    assert {ids.dtype for ids in read} == {np.dtype(np.uint16)}


def test_the_tokenizers_own_truncation_and_special_tokens_do_not_count(tokenizer):
    content = tokenizer.backend_tokenizer
    content.enable_truncation(4)
    content.enable_padding(length=9)
    try:
        read = list(ids_of(["eight chars", "a"], tokenizer))
    finally:
        content.no_truncation()
        content.no_padding()
    assert [len(ids) for ids in read] == [11, 1]


def test_who_takes_no_more_leaves_no_thread(tokenizer):
    before, read = threading.active_count(), []

    def endless():
        while True:
            read.append(1)
            yield "x" * 100_000

    with closing(ids_of(endless(), tokenizer, 2)) as documents:
        next(documents)
    assert threading.active_count() == before and len(read) < 100
