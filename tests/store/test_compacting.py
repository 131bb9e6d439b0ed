"""Datastores that are compacted while others read and write them, or processes are killed."""

import os
from dataclasses import replace

import numpy as np
import pytest

from hf_refspec.drafting.contract import Call
from hf_refspec.drafting.datastore_drafts import DatastoreDrafts
from hf_refspec.store.datastore import Datastore
from hf_refspec.store.files import DatastoreError, write_arrays
from tests.helpers.datastores import FEW, drafts_of, some_documents, write_store
from tests.helpers.stored import content_of


def test_compacting_in_place_again_removes_the_older_form(full):
    before = content_of(full.path)
    for count in (20, 20, 10, 20):
        # The same object each time, which was opened before there was a compact form.
        new = full.compact(max_ngram=2, ngrams_per_order=count)
        new.verify()
        Datastore(full.path).verify()
        now = content_of(full.path)
        assert set(now) == {*before, new.config.ngrams.file.name}
        assert {name: now[name] for name in before if name != "config.json"} == {
            name: before[name] for name in before if name != "config.json"
        }


def test_who_has_the_older_compact_form_open_takes_the_new_one_when_a_call_begins(full, tmp_path):
    reader = full.compact(**FEW)
    before = drafts_of(reader)
    other = full.compact(max_ngram=1, ngrams_per_order=3)
    assert not (full.path / reader.config.ngrams.file.name).exists()
    for use in (reader.verify, lambda: reader.save_pretrained(tmp_path / "copy")):
        with pytest.raises(
            DatastoreError, match=r"missing, .* changed the folder since, open it again"
        ):
            use()
    assert os.listdir(tmp_path) == ["store"]
    assert drafts_of(reader) == drafts_of(other) != before


def test_compacting_keeps_shards_that_were_added_meanwhile(full, tmp_path):
    more = write_store(tmp_path / "more", some_documents(seed=1), cuts=())
    shard = more.config.shards[0]
    files = []
    for file in (shard.tokens_file, shard.suffixes_file):
        name = file.name.replace("00001", "00003")
        (more.path / file.name).rename(full.path / name)
        files.append(replace(file, name=name))
    added = replace(shard, tokens_file=files[0], suffixes_file=files[1])
    replace(full.config, shards=[*full.config.shards, added]).write(full.path)
    compact = full.compact(**FEW)
    assert compact.config.shards == [*full.config.shards, added]
    assert compact.config.ngrams.corpus_tokens == full.tokens
    Datastore(full.path).verify()


def test_compacting_in_place_refuses_a_datastore_that_was_replaced(full):
    replace(full.config, shards=full.config.shards[1:]).write(full.path)
    before = content_of(full.path)
    with pytest.raises(DatastoreError, match="has been replaced meanwhile; open it again"):
        full.compact(**FEW)
    assert content_of(full.path) == before


def test_compacting_needs_the_full_form_and_sound_numbers(full, compact, tmp_path, tokenizer):
    for use in (lambda: compact.compact(**FEW), lambda: compact.retokenize(tokenizer, tmp_path)):
        with pytest.raises(ValueError, match="needs the full form, but only the compact one"):
            use()
    for options, message in (
        ({"max_ngram": 0}, "max_ngram must be at least 1, but is 0"),
        ({"max_ngram": 9}, "max_ngram must be at most 8, but is 9"),
        ({"max_bytes": 4095}, "max_bytes must be at least 4096, but is 4095"),
    ):
        with pytest.raises(ValueError, match=message):
            full.compact(**options)


def test_a_corpus_without_tokens_has_an_empty_compact_form(tmp_path):
    compact = write_store(tmp_path / "store", [[], []], cuts=()).compact()
    compact.verify()
    assert len(compact.ngrams.starts) == 1
    drafter = DatastoreDrafts(compact)
    drafter.begin(np.array([1, 2, 3]), 300)
    assert len(drafter.draft(16, Call())) == 0


def test_compacting_damaged_shards_raises_and_changes_nothing(full):
    length = full.config.shards[0].tokens
    for suffixes in (np.full(length, -1), np.full(length, 2**31 - 1), np.full(length, length)):
        file = write_arrays(
            full.path / "suffixes-00001.safetensors", {"suffixes": suffixes.astype(np.int32)}
        )
        shards = [replace(full.config.shards[0], suffixes_file=file), full.config.shards[1]]
        replace(full.config, shards=shards).write(full.path)
        before = content_of(full.path)
        with pytest.raises(ValueError, match="is damaged: its suffix array"):
            Datastore(full.path).compact(**FEW)
        assert content_of(full.path) == before


TEXTS = [
    "to be or not to be, that is the question: " * 5,
    "to err is human, to forgive divine. " * 5,
]


def test_a_compact_form_that_is_older_than_the_datastore_is_named(tmp_path, tokenizer, caplog):
    store = Datastore.build(TEXTS, tokenizer, tmp_path / "store")
    store.compact()
    assert caplog.text == ""
    before = store.tokens
    extended = store.add(["more text"], tokenizer)
    stale = f"was made of {before} of its {extended.tokens} tokens; compact() it again"
    assert stale in caplog.text
    caplog.clear()
    Datastore(store.path, form="compact")
    assert stale in caplog.text
    caplog.clear()
    extended.add({"name": "a text"}).compact()
    caplog.clear()
    Datastore(store.path, form="compact")
    assert caplog.text == ""
    extended.remove("name")  # whose n-grams are left
    assert f"of its {extended.tokens} tokens; compact() it again" in caplog.text
