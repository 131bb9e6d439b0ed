"""A datastore for another model from the same documents."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from hf_refspec import Datastore

TEXTS = ["def f(x):\n    return x\n", "for i in range(3):\n    print(i)\n", "naïve ☃\n"]


@pytest.fixture(scope="module")
def bpe() -> PreTrainedTokenizerFast:
    """Another tokenizer: with merges."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(TEXTS * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@pytest.fixture
def store(tokenizer, tmp_path) -> Datastore:
    options = {"num_proc": 1, "progress": False, "corpus": "three texts", "license": "mit"}
    return Datastore.build(TEXTS, tokenizer, tmp_path / "store", **options)


def test_the_documents_are_the_same_text(store, bpe, tmp_path):
    options = {"num_proc": 1, "progress": False}
    other = store.retokenize(bpe, tmp_path / "other", **options)
    assert [bpe.decode(ids) for ids in other.iter_documents()] == TEXTS
    assert other.config.fingerprint != store.config.fingerprint
    assert other.config.source["corpus"] == "three texts"
    assert other.config.source["license"] == "mit"
    Datastore(other.path, tokenizer=bpe)


def test_the_compact_form_cannot_be_retokenized(store, bpe, tmp_path):
    compact = store.compact(tmp_path / "compact", progress=False)
    with pytest.raises(ValueError, match="full form"):
        compact.retokenize(bpe, tmp_path / "other")
