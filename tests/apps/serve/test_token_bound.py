"""The bound is never above the number of tokens, and near enough to refuse what is far too long."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_refspec.apps.serve.token_bound import TokenBound
from hf_refspec.apps.shared.loading import load_tokenizer


def byte_level(*words: str, alphabet=None, normalizer=None) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes and of these words."""
    alphabet = alphabet or sorted(pre_tokenizers.ByteLevel.alphabet())
    merges, tokens = [], list(alphabet)
    for word in words:
        for end in range(2, len(word) + 1):
            if word[:end] not in tokens:
                merges.append((word[: end - 1], word[end - 1]))
                tokens.append(word[:end])
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if normalizer is not None:
        backend.normalizer = normalizer
    return PreTrainedTokenizerFast(tokenizer_object=backend)


TOKENIZERS = {
    "trained": load_tokenizer(None),
    "words": byte_level("aaaa", "abab"),
    "few bytes": byte_level("aaaa", alphabet=["a", "b"]),
    "NFC": byte_level("aaaa", normalizer=normalizers.NFC()),
}
BOUNDS = {name: TokenBound(tokenizer) for name, tokenizer in TOKENIZERS.items()}


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(deadline=None)
@given(text=st.text() | st.text("ab \x01"))
@example("a" * 1000)
@example("\u0399\u0308\u0301" * 300)
@example("\u212a" * 300)
@example("\x04" * 300)
@example(" " * 2000)
@example("<|im_start|>" * 300)
def test_it_is_never_above_the_number_of_tokens(name, text):
    assert BOUNDS[name].of(text) <= len(TOKENIZERS[name](text)["input_ids"])


def test_a_text_that_is_far_too_long_is_known_to_be():
    assert BOUNDS["trained"].of("the cat sat " * 100_000) > 10_000
    assert BOUNDS["words"].of("ab" * 100) == 50
    assert BOUNDS["NFC"].of("ab" * 200) == 25


def test_where_a_token_may_stand_for_any_length_there_is_no_bound():
    stripping = byte_level("aaaa")
    stripping.add_tokens(AddedToken("<x>", lstrip=True))
    spaces = byte_level("aaaa", normalizer=normalizers.Replace("  ", " "))
    words = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"[UNK]": 0}, "[UNK]"))
    )
    for tokenizer in (stripping, spaces, words):
        assert TokenBound(tokenizer).of("a" * 10**6) == 0
