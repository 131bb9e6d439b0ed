"""The tokenizer that a datastore carries, and the fingerprint, which changes with the ids that a
tokenizer gives and with nothing else."""

import json
import shutil
from argparse import Namespace
from dataclasses import replace

import pytest
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

from hf_refspec.apps.cli.search import search as searched
from hf_refspec.corpus.tokenise import vocabulary_size
from hf_refspec.store.datastore import Datastore
from hf_refspec.store.datastore_config import StoreConfig
from hf_refspec.store.files import DatastoreError
from hf_refspec.store.stored_tokenizer import (
    public_name,
    read_tokenizer,
    tokenizer_fingerprint,
)
from tests.helpers.stored import entry_of

TEXTS = ["def area(width, height):\n", "naïve ☃\n"]


@pytest.fixture
def store(tokenizer, tmp_path) -> Datastore:
    """Built with a tokenizer of a folder that is gone by now."""
    folder = tmp_path / "somewhere" / "bytes"
    tokenizer.save_pretrained(folder)
    named = PreTrainedTokenizerFast.from_pretrained(folder)
    shutil.rmtree(folder)
    return Datastore.build(TEXTS, named, tmp_path / "store")


def assert_carries(store: Datastore) -> None:
    carried = store.load_tokenizer()
    assert [carried.decode(ids) for ids in store.iter_documents()] == TEXTS


def test_it_is_found_without_a_name_and_the_store_can_be_extended(store):
    assert_carries(store)
    more = store.add(["more"])
    carried = more.load_tokenizer()
    assert [carried.decode(ids) for ids in more.iter_documents()] == [*TEXTS, "more"]
    more.verify()


@pytest.mark.parametrize(("vocab_size", "largest"), [(259, 259), (2**31 - 1, 2**16)])
def test_ids_that_no_vocabulary_has_are_refused(store, vocab_size, largest):
    # The library would allocate memory for every id below the largest one.
    path = store.path / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"]["l"] = largest
    path.write_text(json.dumps(content))
    with pytest.raises(
        DatastoreError, match=rf"{path} is not a tokenizer: it has the id {largest}, of"
    ):
        read_tokenizer(store.path, entry_of(path), "bytes", vocab_size)


def test_copies_and_the_compact_form_carry_it_too(store, tmp_path):
    store.save_pretrained(tmp_path / "copy")
    assert_carries(Datastore(tmp_path / "copy"))
    compact = store.compact(tmp_path / "compact")
    assert compact.load_tokenizer().decode(compact.load_tokenizer()("é")["input_ids"]) == "é"
    compact.verify()


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"\xff"])
def test_a_damaged_one_is_refused_and_without_one_it_is_asked_for(store, content):
    path = store.path / "tokenizer.json"
    for written in (content, content.ljust(path.stat().st_size)):
        path.write_bytes(written)
        with pytest.raises(DatastoreError, match=r"tokenizer.json is damaged"):
            store.load_tokenizer()
    replace(store.config, tokenizer_file=None).write(store.path)
    with pytest.raises(DatastoreError, match="names no file of its tokenizer; give the tokenizer"):
        Datastore(store.path).load_tokenizer()


def test_of_chats_its_own_copy_adds_turns_and_a_chat_models_tokenizer_whole_chats(store, tokenizer):
    chats = Dataset.from_dict({"messages": [[{"role": "user", "content": "hello"}]]})
    for chosen, added in ((None, "hello"), (tokenizer, "user: hello\n")):
        *_, last = Datastore(store.path).add(chats, chosen).iter_documents()
        assert tokenizer.decode(last) == added


def damaged(store: Datastore, **changes) -> Datastore:
    """A datastore whose tokenizer is another one, for which its config.json vouches."""
    path = store.path / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    replace(store.config, tokenizer_file=entry_of(path)).write(store.path)
    return Datastore(store.path)


@pytest.mark.parametrize(
    ("part", "fault"),
    [
        ({"model": {}}, ""),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AA=="}}, "Precompiled"),
        ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "chunk size"),
        ({"decoder": {"type": "Strip", "content": "a", "start": 10**9, "stop": 5}}, "index out of"),
    ],
)
def test_what_is_no_tokenizer_or_panics_over_any_text_is_refused(store, part, fault):
    store = damaged(store, **part)
    message = rf"{store.path / 'tokenizer.json'} is not a tokenizer: (it fails: )?{fault}"
    with pytest.raises(DatastoreError, match=message):
        store.load_tokenizer()


# Searches for so long that the library gives up.
REGEX = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}


def test_one_that_panics_over_a_text_is_named_where_it_is_used(store):
    store, text = damaged(store, pre_tokenizer=REGEX), "a" * 40 + "b"
    with pytest.raises(DatastoreError, match=r"^the tokenizer fails on a text, 'aaa.*: "):
        store.add([text])
    assert len(StoreConfig.read(store.path).shards) == 1
    with pytest.raises(DatastoreError, match=f"^{store.path}: its tokenizer fails: "):
        searched(Namespace(store=str(store.path), text=text))


def test_a_decoder_that_panics_is_named(store, tokenizer, tmp_path):
    # No word of the text that every tokenizer has to read has an "h".
    store = damaged(store, decoder={"type": "Strip", "content": "h", "start": 10**9, "stop": 5})
    with pytest.raises(DatastoreError, match=f"^{store.path}: its tokenizer fails: index out of"):
        store.retokenize(tokenizer, tmp_path / "new")
    assert not (tmp_path / "new").exists()


VOCABULARY = {"a": 0, "b": 1, "c": 2, "ab": 3, "bc": 4}
MERGES = [("a", "b"), ("b", "c")]


def bpe(vocabulary: dict[str, int] = VOCABULARY, merges: list = MERGES) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def with_added(method: str, tokens) -> PreTrainedTokenizerFast:
    tokenizer = bpe()
    getattr(tokenizer, method)(tokens)
    return tokenizer


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
        with_added("add_tokens", ["new"]),
        with_added("add_special_tokens", {"eos_token": "</s>"}),
    ],
)
def test_other_ids_or_merges_have_another(other):
    assert tokenizer_fingerprint(other) != tokenizer_fingerprint(bpe())


def test_what_gives_no_other_ids_does_not_count():
    tokenizer = bpe(dict(reversed(VOCABULARY.items())))
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.padding_side = "left"
    tokenizer.model_max_length = 7
    tokenizer.name_or_path = "org/other"
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.backend_tokenizer.decoder = decoders.BPEDecoder()
    tokenizer.backend_tokenizer.enable_padding()
    tokenizer.backend_tokenizer.enable_truncation(5)
    for _ in range(2):
        assert tokenizer_fingerprint(tokenizer) == "f54d1dbdabe730e57d982114e46241cd"
        tokenizer("abc")


def test_it_is_the_same_once_saved_however_merges_are_written(tmp_path):
    tokenizer = bpe()
    tokenizer.save_pretrained(tmp_path)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    pairs = [list(pair) for pair in MERGES]
    for merges in (None, pairs, [" ".join(pair) for pair in MERGES]):
        if merges is not None:
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


def test_a_slow_tokenizer_is_refused():
    with pytest.raises(ValueError, match=r"must be a fast one .*, but has the type Slow"):
        tokenizer_fingerprint(Slow())


def test_all_ids_are_below_the_vocabulary_size(tokenizer):
    assert vocabulary_size(bpe()) == 5
    assert vocabulary_size(bpe({**VOCABULARY, "far": 1000})) == 1001
    assert vocabulary_size(tokenizer) == len(tokenizer) == 259
    assert vocabulary_size(with_added("add_tokens", ["new"])) == 6


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
        ("/home/hf_refspec/SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct"),
        ("/hub/models--org--name-1.5/snapshots/01ab", "org/name-1.5"),
    ],
)
def test_no_path_is_a_public_name(name, public):
    class Named:
        name_or_path = name

    assert public_name(Named()) == public
