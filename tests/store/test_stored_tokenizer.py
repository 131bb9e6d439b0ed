"""The tokenizer that a datastore carries with it."""

from __future__ import annotations

import json
import shutil
from argparse import ArgumentParser
from dataclasses import replace

import pytest
from datasets import Dataset
from stored import entry_of
from transformers import PreTrainedTokenizerFast

from hf_refspec.apps.cli.search import add_search
from hf_refspec.store.datastore import Datastore
from hf_refspec.store.datastore_config import StoreConfig
from hf_refspec.store.files import DatastoreError
from hf_refspec.store.stored_tokenizer import read_tokenizer, tokenizer_fingerprint

TEXTS = ["def area(width, height):\n", "naïve ☃\n"]
OPTIONS = {"num_proc": 1, "progress": False}


@pytest.fixture
def store(tokenizer, tmp_path) -> Datastore:
    """Built with a tokenizer of a folder that is gone by now."""
    folder = tmp_path / "somewhere" / "bytes"
    tokenizer.save_pretrained(folder)
    named = PreTrainedTokenizerFast.from_pretrained(folder)
    shutil.rmtree(folder)
    return Datastore.build(TEXTS, named, tmp_path / "store", **OPTIONS)


def assert_carries(store: Datastore) -> None:
    carried = store.load_tokenizer()
    assert [carried.decode(ids) for ids in store.iter_documents()] == TEXTS


def test_it_is_found_without_a_name_and_the_store_can_be_extended(store):
    assert_carries(store)
    more = store.extend(["more"], **OPTIONS)
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
    with pytest.raises(DatastoreError, match=rf"{path} is damaged: it has the id {largest}, of"):
        read_tokenizer(store.path, entry_of(path), "bytes", vocab_size)


def test_copies_and_the_compact_form_carry_it_too(store, tmp_path):
    store.save_pretrained(tmp_path / "copy")
    assert_carries(Datastore(tmp_path / "copy"))
    compact = store.compact(tmp_path / "compact", progress=False)
    assert compact.load_tokenizer().decode(compact.load_tokenizer()("é")["input_ids"]) == "é"
    compact.verify()


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"\xff"])
def test_a_damaged_one_is_refused(store, content):
    path = store.path / "tokenizer.json"
    size = path.stat().st_size
    path.write_bytes(content)
    with pytest.raises(DatastoreError, match=r"tokenizer.json is damaged"):
        store.load_tokenizer()
    path.write_bytes(content.ljust(size))
    with pytest.raises(DatastoreError, match=r"tokenizer.json is damaged: its checksum"):
        store.load_tokenizer()


def test_a_store_that_names_no_tokenizer_asks_for_one(store):
    replace(store.config, tokenizer_file=None).write(store.path)
    with pytest.raises(DatastoreError, match="names no file of its tokenizer; give the tokenizer"):
        Datastore(store.path).load_tokenizer()


def test_of_chats_its_own_copy_adds_turns_and_a_chat_models_tokenizer_whole_chats(store, tokenizer):
    chats = Dataset.from_dict({"messages": [[{"role": "user", "content": "hello"}]]})
    for chosen, added in ((None, "hello"), (tokenizer, "user: hello\n")):
        *_, last = Datastore(store.path).extend(chats, chosen, **OPTIONS).iter_documents()
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
    message = rf"{store.path / 'tokenizer.json'} is no tokenizer: {fault}"
    with pytest.raises(DatastoreError, match=message):
        store.load_tokenizer()


# Searches for so long that the library gives up.
REGEX = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}


def test_one_that_panics_over_a_text_is_named_where_it_is_used(store):
    store, text = damaged(store, pre_tokenizer=REGEX), "a" * 40 + "b"
    message = rf"^{store.path} cannot be extended: the tokenizer fails on a text, 'aaa.*: "
    with pytest.raises(DatastoreError, match=message):
        store.extend([text], **OPTIONS)
    assert len(StoreConfig.read(store.path).shards) == 1
    with pytest.raises(DatastoreError, match=f"^{store.path}: its tokenizer fails: "):
        search(store, text)


def search(store: Datastore, text: str) -> None:
    """Runs `hf-refspec store search`."""
    parser = ArgumentParser()
    add_search(parser)
    arguments = parser.parse_args([str(store.path), text])
    arguments.run(arguments)


def test_one_that_lacks_a_token_for_what_it_does_not_know_is_named(store, tmp_path):
    model = {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##"}
    model |= {"max_input_chars_per_word": 100, "vocab": {"a": 0}}
    path = store.path / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model": model, "added_tokens": []}))
    loaded = read_tokenizer(store.path, entry_of(path), "pieces", 259)
    about = {"fingerprint": tokenizer_fingerprint(loaded), "vocab_size": 1}
    config = replace(store.config, tokenizer_file=entry_of(path), **about)
    config.write(store.path)
    message = rf"{store.path} cannot be extended: .*: WordPiece error: Missing \[UNK\]"
    with pytest.raises(DatastoreError, match=message):
        Datastore(store.path).extend(["text"], **OPTIONS)


def test_a_decoder_that_panics_is_named(store, tokenizer, tmp_path):
    # No word of the text that every tokenizer has to read has an "h".
    store = damaged(store, decoder={"type": "Strip", "content": "h", "start": 10**9, "stop": 5})
    with pytest.raises(DatastoreError, match=f"^{store.path}: its tokenizer fails: index out of"):
        store.retokenize(tokenizer, tmp_path / "new", **OPTIONS)
    assert not (tmp_path / "new").exists()
