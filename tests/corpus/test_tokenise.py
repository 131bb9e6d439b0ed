"""Documents are cut into pieces and tokenised as they are."""

from __future__ import annotations

import numpy as np

from hf_refspec.corpus.tokenise import LONGEST_PIECE, batches, encode, load_backend, pieces


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


def test_batches_are_bounded_by_characters_and_number():
    texts = ["a" * length for length in (4, 6, 1, 40, 1, 1, 1, 1, 0)]
    lengths = [[len(text) for text in batch] for batch in batches(texts, 10, 3)]
    assert lengths == [[4, 6], [1], [40], [1, 1, 1], [1, 0]]
