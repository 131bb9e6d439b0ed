"""Documents come, change and go in an open datastore, as in a dict."""

import copy
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import sleep

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_refspec.drafting.contract import Call
from hf_refspec.drafting.datastore_drafts import DatastoreDrafts
from hf_refspec.store import datastore
from hf_refspec.store.build import read_names, write_names
from hf_refspec.store.datastore import Datastore
from hf_refspec.store.files import DatastoreError
from tests.helpers.byte_model import word_tokenizer
from tests.helpers.datastores import documents_of
from tests.helpers.stored import content_of, flip_last_bit

# Few tokens, so that documents are alike, and documents that do not fit into a shard.
texts = st.lists(st.integers(0, 3), max_size=12)
changes = st.dictionaries(st.sampled_from("abcdef"), texts, min_size=1)


def drafted(store: Datastore, *context: int) -> list[int]:
    drafter = DatastoreDrafts(store)
    drafter.begin(np.array(context), 259)
    return drafter.draft(8, Call()).tokens.tolist()


@given(st.lists(changes, min_size=1, max_size=5), st.integers(3, 20))
def test_it_holds_what_a_dict_would(tokenizer, steps, shard_tokens):
    with TemporaryDirectory() as folder:
        # Each document has tokens that say where it came in.
        options = {"shard_tokens": shard_tokens}
        store = Datastore.build([[9] * 20, [8]], tokenizer, Path(folder) / "store", **options)
        expected: dict[str, list[int]] = {}
        for step in steps:
            store.add(step, tokenizer, **options)
            for name, text in step.items():
                if expected.get(name) != text:
                    expected.pop(name, None)
                    expected |= {name: text} if text else {}
            assert store.names() == sorted(expected)
            assert documents_of(store.path) == [[9] * 20, [8], *expected.values()]
            assert [text.tolist() for text in store.iter_documents()] == documents_of(store.path)
        store.merge().verify()
        assert documents_of(store.path) == [[9] * 20, [8], *expected.values()]


@pytest.fixture
def store(tmp_path, tokenizer) -> Datastore:
    documents = {"first": [1, 2, 3, 4], "second": [1, 2, 5, 6]}
    return Datastore.build(documents, tokenizer, tmp_path / "store")


def test_drafts_come_from_the_new_documents_in_forks_too_and_not_from_the_old(store):
    fork = copy.deepcopy(store)
    other = Datastore(store.path)
    assert {*drafted(fork, 1, 2)} == {3, 4, 5, 6}
    store.add({"first": [1, 2, 7], "third": [1, 2, 8]})
    assert {*drafted(fork, 1, 2)} == {5, 6, 7, 8}
    assert {*drafted(other, 1, 2)} == {5, 6, 7, 8} == {*drafted(Datastore(store.path), 1, 2)}
    store.remove("second", "third")
    assert drafted(fork, 1, 2) == [7]
    store.verify()


def test_a_store_for_another_tokenizer_or_none_in_its_place_is_not_taken(store, tmp_path):
    other = Datastore(store.path)
    words = word_tokenizer(["<unk>", "a"])
    Datastore.build(["a a"], words, tmp_path / "words")
    for place in (tmp_path / "words", tmp_path / "none"):
        shutil.rmtree(store.path)
        if place.exists():
            shutil.copytree(place, store.path)
        assert {*drafted(other, 1, 2)} == {3, 4, 5, 6}


def test_what_was_measured_is_dropped_with_a_document_of_the_same_length(store):
    store.record({"form": "full", "MAT": 2.0})
    store.refresh()
    assert store.config.measured
    assert not store.add({"first": [1, 2, 3, 5]}).config.measured


def test_what_is_as_before_is_not_written_again(store):
    before = content_of(store.path)
    store.add({"second": [1, 2, 5, 6], "first": [1, 2, 3, 4], "none": []})
    assert content_of(store.path) == before


def test_what_cannot_be_changed_is_named_and_left(store):
    before = content_of(store.path)
    with pytest.raises(KeyError, match="has no document 'third'"):
        store.remove("first", "third")
    with pytest.raises(ValueError, match="would have no document any more; delete the folder"):
        store.remove("first", "second")
    snapshot = store.path.parent / "datasets--a--b" / "snapshots" / "ab"
    store.save_pretrained(snapshot)
    with pytest.raises(PermissionError, match="it is in the Hub's cache; change a copy"):
        Datastore(snapshot).remove("first")
    with pytest.raises(ValueError, match="third has the id 259"):
        store.add({"first": [1], "third": [259]})
    assert content_of(store.path) == before and {*drafted(store, 1, 2)} == {3, 4, 5, 6}


@pytest.mark.parametrize(
    "names", [[1], {"first": 1}, {"first": ["0", ""]}, {"first": [1 << 70, ""]}]
)
def test_damaged_names_are_refused(store, names):
    path = store.path / store.config.names_file.name
    flip_last_bit(path)
    with pytest.raises(DatastoreError, match=f"{path} is damaged: its checksum"):
        store.remove("first")
    entry = write_names(store.path, names)
    replace(store.config, names_file=entry).write(store.path)
    with pytest.raises(DatastoreError, match=f"{entry.name} is damaged: it has other values"):
        store.remove("first")


def test_calls_that_draft_meanwhile_see_whole_documents(store):
    ended, found = threading.Event(), []

    def read() -> None:
        while not ended.is_set():
            found.append(drafted(store, 1, 2))

    reader = threading.Thread(target=read)
    reader.start()
    for token in range(10, 40):
        store.add({"first": [1, 2, token, token + 100], "second": [1, 2, 9]})
        begun = len(found) + 2  # the second draft from here on begins after the change
        while len(found) < begun and reader.is_alive():
            sleep(0.001)
    ended.set()
    reader.join()
    # The first document's tokens, both of one version, and the second document's.
    seen = [sorted({*tokens} - {9}) for tokens in found]
    assert all(
        tokens in ([3, 4, 5, 6], [token, token + 100]) for tokens in seen for token in [tokens[0]]
    )
    assert len({tuple(tokens) for tokens in seen}) >= 30


def test_names_are_those_of_one_moment_while_another_process_writes(store, monkeypatch):
    """As it writes between the reading of config.json and that of the file which that names."""
    other, reads = Datastore(store.path), iter([{"third": [7]}, {"fourth": [8]}])

    def read(folder, entry):
        other.add(step) if (step := next(reads, None)) else None
        return read_names(folder, entry)

    monkeypatch.setattr(datastore, "read_names", read)
    assert store.names() == ["first", "fourth", "second", "third"]
