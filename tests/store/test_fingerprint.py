"""A tokenizer's fingerprint changes with the ids that it gives, and with nothing else."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

from hf_refspec.store.stored_tokenizer import public_name, tokenizer_fingerprint, vocabulary_size

VOCABULARY = {"a": 0, "b": 1, "c": 2, "ab": 3, "bc": 4}
MERGES = [("a", "b"), ("b", "c")]


def bpe(vocabulary: dict[str, int] = VOCABULARY, merges: list = MERGES) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def test_it_is_hexadecimal_and_always_the_same():
    fingerprint = tokenizer_fingerprint(bpe())
    assert fingerprint == "f54d1dbdabe730e57d982114e46241cd"
    reordered = dict(reversed(VOCABULARY.items()))
    assert tokenizer_fingerprint(bpe(reordered)) == fingerprint


@pytest.mark.parametrize(
    "other",
    [
        bpe({**VOCABULARY, "x": 5}),
        bpe({**VOCABULARY, "a": 1, "b": 0}),
        bpe({"A": 0, "b": 1, "c": 2, "bc": 4}, MERGES[1:]),
        bpe({**VOCABULARY, "c": 7}),
        bpe(merges=MERGES[::-1]),
        bpe(merges=MERGES[:1]),
        bpe(merges=[]),
    ],
)
def test_other_ids_or_merges_have_another(other):
    assert tokenizer_fingerprint(other) != tokenizer_fingerprint(bpe())


def test_an_added_token_gives_another():
    tokenizer = bpe()
    for add in (
        lambda: tokenizer.add_tokens(["new"]),
        lambda: tokenizer.add_special_tokens({"eos_token": "</s>"}),
    ):
        before = tokenizer_fingerprint(tokenizer)
        add()
        assert tokenizer_fingerprint(tokenizer) != before


def test_what_gives_no_other_ids_does_not_count():
    tokenizer = bpe()
    fingerprint = tokenizer_fingerprint(tokenizer)
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.padding_side = "left"
    tokenizer.model_max_length = 7
    tokenizer.name_or_path = "org/other"
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.backend_tokenizer.decoder = decoders.BPEDecoder()
    tokenizer.backend_tokenizer.enable_padding()
    tokenizer.backend_tokenizer.enable_truncation(5)
    assert tokenizer_fingerprint(tokenizer) == fingerprint
    tokenizer("abc")
    assert tokenizer_fingerprint(tokenizer) == fingerprint


def test_it_is_the_same_once_saved(tmp_path, tokenizer):
    fingerprint = tokenizer_fingerprint(tokenizer)
    tokenizer.save_pretrained(tmp_path)
    loaded = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert tokenizer_fingerprint(loaded) == fingerprint


def test_merges_count_alike_however_they_are_written(tmp_path):
    tokenizer = bpe()
    tokenizer.save_pretrained(tmp_path)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    pairs = [list(pair) for pair in MERGES]
    for merges in (pairs, [" ".join(pair) for pair in MERGES]):
        content["model"]["merges"] = merges
        path.write_text(json.dumps(content))
        loaded = PreTrainedTokenizerFast.from_pretrained(tmp_path)
        assert tokenizer_fingerprint(loaded) == tokenizer_fingerprint(tokenizer)


def test_tokenizers_without_merges_have_one():
    for model in (
        models.WordLevel({"\0": 0, "[UNK]": 1}, unk_token="[UNK]"),
        models.Unigram([("\U0001f600", -1.0), ("[UNK]", -2.0)], unk_id=1),
    ):
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model))
        assert len(tokenizer_fingerprint(tokenizer)) == 32
        assert vocabulary_size(tokenizer) == 2


class Slow(PreTrainedTokenizer):
    def get_vocab(self) -> dict[str, int]:
        return {"a": 0}

    @property
    def vocab_size(self) -> int:
        return 1


@pytest.mark.parametrize("tokenizer", [Slow(), "org/name", None])
def test_what_is_no_fast_tokenizer_is_refused(tokenizer):
    message = f"tokenizer must be a fast one .*, but is a {type(tokenizer).__name__}"
    with pytest.raises(ValueError, match=message):
        tokenizer_fingerprint(tokenizer)


def test_all_ids_are_below_the_vocabulary_size(tokenizer):
    assert vocabulary_size(bpe()) == 5
    assert vocabulary_size(bpe({**VOCABULARY, "far": 1000})) == 1001
    assert vocabulary_size(tokenizer) == len(tokenizer) == 259
    added = bpe()
    added.add_tokens(["new"])
    assert vocabulary_size(added) == 6


@pytest.mark.parametrize(
    ("name", "public"),
    [
        ("org/name-1.5", "org/name-1.5"),
        ("gpt2", "gpt2"),
        ("", "Named"),
        ("/home/me/models/bytes", "bytes"),
        ("../models/bytes", "bytes"),
        ("~/models/bytes", "bytes"),
        ("home/me/bytes", "bytes"),
    ],
)
def test_no_path_is_a_public_name(name, public):
    class Named:
        name_or_path = name

    assert public_name(Named()) == public
