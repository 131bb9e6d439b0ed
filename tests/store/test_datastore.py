"""Datastores that are opened, verified, copied and drafted from, whatever their files are."""

import copy
import json
import os
import pickle
import resource
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from hf_refspec.drafting.calls import drafter_call
from hf_refspec.drafting.contract import Call
from hf_refspec.drafting.datastore_drafts import DatastoreDrafts
from hf_refspec.store import shards
from hf_refspec.store.datastore import Datastore
from hf_refspec.store.datastore_config import ShardEntry, StoreConfig
from hf_refspec.store.files import DatastoreError, FileEntry, write_arrays
from hf_refspec.store.stored_tokenizer import tokenizer_fingerprint
from tests.helpers.datastores import (
    DOCUMENTS,
    FEW,
    FINGERPRINT,
    drafts_of,
    write_store,
)
from tests.helpers.stored import content_of


def test_each_form_is_opened_where_it_is(full, both, compact):
    assert (full.form, full.ngrams, len(full.shards)) == ("full", None, 2)
    assert both.form == Datastore(both.path, "full").form == "full"
    opened = Datastore(both.path, form="compact")
    for each in (opened, compact, Datastore(compact.path), Datastore(compact.path, "compact")):
        assert (each.form, each.shards) == ("compact", [])
        assert len(each.ngrams.starts) - 1 == sum(each.config.ngrams.ngrams)
        assert drafts_of(each) == drafts_of(compact)
    assert (both.tokens, both.documents) == (sum(map(len, DOCUMENTS)), 22)
    assert (compact.tokens, compact.documents) == (0, 0)
    assert compact.config.ngrams.corpus_tokens == both.tokens
    assert repr(both) == (
        f"Datastore('{both.path}', form='full', tokens={both.tokens:,}, "
        f"documents={both.documents}, tokenizer={both.config.tokenizer!r})"
    )


def test_a_form_that_is_missing_is_named(full, compact):
    with pytest.raises(DatastoreError, match=r"has no compact form; make it with compact\(\)"):
        Datastore(full.path, form="compact")
    with pytest.raises(DatastoreError, match="has only the compact form, not the full"):
        Datastore(compact.path, form="full")
    for form in ("", "FULL", 1, ("full",)):
        with pytest.raises(ValueError, match=r"form must be one of \('full', 'compact'\), but is"):
            Datastore(full.path, form=form)


def test_another_tokenizer_is_refused_with_both_fingerprints(tmp_path, full, tokenizer):
    fingerprint = tokenizer_fingerprint(tokenizer)
    with pytest.raises(DatastoreError, match=rf"org/tokenizer.*{FINGERPRINT}.*{fingerprint}"):
        Datastore(full.path, tokenizer=tokenizer)
    write_store(tmp_path / "long", DOCUMENTS, fingerprint="f" * 100_000)
    with pytest.raises(DatastoreError, match="made for another tokenizer") as refused:
        Datastore(tmp_path / "long", tokenizer=tokenizer)
    assert len(str(refused.value)) < 1000
    options = {"fingerprint": fingerprint, "vocab_size": len(tokenizer)}
    documents = [[token % len(tokenizer) for token in document] for document in DOCUMENTS]
    write_store(tmp_path / "right", documents, **options)
    Datastore(tmp_path / "right", tokenizer=tokenizer)


def test_more_ids_than_the_tokenizer_has_are_refused(tmp_path, tokenizer):
    store = Datastore.build(["a text"], tokenizer, tmp_path / "store")
    replace(store.config, vocab_size=260).write(store.path)
    message = rf"{store.path} is damaged: its vocab_size is 260, but its tokenizer has 259 ids"
    for use in (
        lambda: Datastore(store.path, tokenizer=tokenizer),
        lambda: Datastore(store.path).load_tokenizer(),
        lambda: store.add(["more"], tokenizer),
    ):
        with pytest.raises(DatastoreError, match=message):
            use()


def test_files_that_do_not_belong_together_are_told_with_the_path(both):
    for file in both.path.glob("suffixes-*"):
        suffixes = load_file(file)["suffixes"]
        suffixes[::2] += 10_000
        save_file({"suffixes": suffixes}, file)
    file = both.path / both.config.ngrams.file.name
    arrays = load_file(file)
    save_file(arrays | {"starts": arrays["starts"] + 100_000}, file)
    message = rf"{both.path}: the datastore is damaged: .*verify\(\) tells which file it is"
    for form in ("full", "compact"):
        with pytest.raises(DatastoreError, match=message):
            drafter = DatastoreDrafts(Datastore(both.path, form))
            with drafter_call(drafter, [np.array(DOCUMENTS[0][:3])], 300):
                drafter.draft(16, Call())


def test_a_pickle_opens_the_same_files(both, monkeypatch, tmp_path):
    for store in (both, Datastore(both.path, "compact")):
        copied = pickle.dumps(store)
        assert len(copied) < 1000
        again = pickle.loads(copied)
        assert (again.form, again.config) == (store.form, store.config)
        assert drafts_of(again) == drafts_of(store)
    monkeypatch.chdir(both.path.parent)
    copied = pickle.dumps(Datastore("store"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert pickle.loads(copied).config == both.config


@pytest.mark.parametrize("cuts", [(), (330,), (1, 2, 3), (40, 41, 600)])
@pytest.mark.parametrize("block", [1, 2, 7, 100, 1 << 20])
def test_documents_come_back_wherever_shards_and_blocks_end(tmp_path, cuts, block, monkeypatch):
    monkeypatch.setattr(shards, "_BLOCK", block)
    store = write_store(tmp_path / "store", DOCUMENTS, cuts=cuts)
    assert [document.tolist() for document in store.iter_documents()] == DOCUMENTS


def test_verifying_reads_what_is_open_and_never_waits(both):
    compact = Datastore(both.path, "compact")
    path = both.path / both.config.shards[0].tokens_file.name
    path.unlink()
    compact.verify()
    ngrams = both.path / both.config.ngrams.file.name
    ngrams.unlink()
    os.mkfifo(ngrams)
    with pytest.raises(DatastoreError, match=f"{ngrams.name} is not a file"):
        compact.verify()


@pytest.mark.parametrize("length", [0, 3, 6, 1000])
def test_slots_that_are_no_power_of_two_are_refused(compact, tmp_path, length):
    arrays = load_file(compact.path / compact.config.ngrams.file.name)
    arrays["slots"] = np.resize(arrays["slots"], length)
    ngrams = compact.config.ngrams
    file = write_arrays(tmp_path / ngrams.file.name, arrays)
    replace(compact.config, ngrams=replace(ngrams, file=file)).write(tmp_path)
    with pytest.raises(DatastoreError, match=rf"damaged: slots has {length} entries, no power"):
        Datastore(tmp_path)


def test_a_copy_has_what_is_open(both, tmp_path):
    both.save_pretrained(tmp_path / "a")
    assert content_of(tmp_path / "a") == content_of(both.path)
    copied = Datastore(tmp_path / "a")
    copied.verify()
    assert copied.config == both.config
    Datastore(both.path, "compact").save_pretrained(tmp_path / "b" / "c")
    copied = Datastore(tmp_path / "b" / "c")
    copied.verify()
    assert (copied.form, copied.config.shards) == ("compact", [])
    assert len(content_of(copied.path)) == 2


def memory() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def write_zeros(folder: Path, length: int, number: int) -> ShardEntry:
    """Writes a shard of zeros that takes no room on the disk."""
    files = []
    for name, dtype in (("tokens", "U16"), ("suffixes", "I32")):
        path, size = folder / f"{name}-{number:05}.safetensors", length * int(dtype[1:]) // 8
        header = json.dumps({name: {"dtype": dtype, "shape": [length], "data_offsets": [0, size]}})
        header += " " * (-len(header) % 8)
        with open(path, "wb") as file:
            file.write(struct.pack("<Q", len(header)) + header.encode())
            file.truncate(file.tell() + size)
        files.append(FileEntry(path.name, path.stat().st_size, ""))
    return ShardEntry(length, 0, *files)


def test_opening_reads_next_to_nothing_of_a_huge_datastore(tmp_path):
    length = 2**31 - 2
    zeros = [write_zeros(tmp_path, length, number) for number in (1, 2)]
    StoreConfig("f", "t", 300, {}, zeros).write(tmp_path)
    before = memory()
    store = Datastore(tmp_path)
    assert store.tokens == 2 * length  # 26 GB
    assert [len(shard.suffixes) for shard in store.shards] == [length, length]
    assert memory() - before < 5e6


def test_the_largest_tokens_are_drafted(tmp_path):
    largest = 2**31 - 2
    documents = [[largest, 5, largest - 1, largest]] * 9
    store = write_store(tmp_path / "store", documents, 2**31 - 1, cuts=(7,))
    for each in (store, store.compact(**FEW)):
        drafter = DatastoreDrafts(each)
        drafter.begin(np.array([largest, 5]), 2**31 - 1)
        draft = drafter.draft(8, Call())
        draft.checked(2**31 - 1)
        assert draft.tokens[0] == largest - 1 and largest in draft.tokens


def test_the_documents_are_the_same_text_for_another_tokenizer(tokenizer, tmp_path):
    texts = ["def f(x):\n    return x\n", "naïve ☃\n"]
    about = {"corpus_name": "three texts", "license": "mit"}
    store = Datastore.build(texts, tokenizer, tmp_path / "store", **about)
    words = copy.deepcopy(tokenizer)
    words.add_tokens(["return"])
    other = store.retokenize(words, tmp_path / "other")
    assert other.tokens == store.tokens - 5
    assert [words.decode(ids) for ids in other.iter_documents()] == texts
    assert other.config.fingerprint != store.config.fingerprint
    assert other.config.source["corpus"] == "three texts"
    assert other.config.source["license"] == "mit"
    Datastore(other.path, tokenizer=words)
