"""What `DatastoreDrafts` drafts from a small datastore, and that it changes no id."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from hf_refspec import Datastore, DatastoreDrafts, ReferenceCopy
from hf_refspec.index.rest_trie import CONTINUATION_LENGTH, REST_PLACES
from hf_refspec.store.files import write_arrays
from tests.helpers.calls import assert_lossless
from tests.helpers.datastores import write_store
from tests.helpers.drafters import drafted as draft
from tests.helpers.passes import passes_of
from tests.helpers.trees import nodes_of

VOCAB_SIZE = 50


def write_shards(folder: Path, shards, vocab_size=VOCAB_SIZE, fingerprint="") -> Datastore:
    """Writes a datastore with these documents in each shard."""
    lengths = [sum(len(document) + 1 for document in documents) for documents in shards]
    documents = [document for documents in shards for document in documents]
    cuts = tuple(np.cumsum(lengths[:-1]).tolist())
    return write_store(folder, documents, vocab_size, cuts, fingerprint)


DOCUMENTS = [
    # After 2 3 mostly 4 5, after 1 2 3 only ever 6 7, once.
    [[2, 3, 4, 5]] * 4,
    [[1, 2, 3, 6, 7, 8, 9, 10, 11], [2, 3, 4, 9], [20, 20]],
    [[2, 3], [30, 31], [30, 32]],
]


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Datastore:
    folder = tmp_path_factory.mktemp("stores") / "small"
    return write_shards(folder, DOCUMENTS)


@pytest.fixture(scope="module")
def compact(store, tmp_path_factory) -> Datastore:
    return store.compact(tmp_path_factory.mktemp("stores") / "compact", progress=False)


# --- what is drafted


def test_rest_takes_the_most_frequent_nodes(store):
    tree = draft(DatastoreDrafts(store, published=True), [40, 2, 3])
    assert list(nodes_of(tree))[:2] == [(4,), (4, 5)]
    # Of seven places, four go on with 4 5, one with 4 9, one with 6, and one ends.
    assert tree.probs[:2].tolist() == pytest.approx([5 / 7, 4 / 7])
    assert {(4, 9), (6,)} < set(nodes_of(tree))


@pytest.mark.parametrize("published", [True, False])
@pytest.mark.parametrize("text", [([1, 2, 3], ()), ([9], [1, 2, 3]), ([1, 2], [3])])
def test_max_match_is_how_many_last_tokens_count(store, published, text):
    long = DatastoreDrafts(store, published=published)
    short = DatastoreDrafts(store, 2, published=published)
    assert nodes_of(draft(short, *text)) == nodes_of(draft(long, [2, 3])) != {}


def test_rest_has_the_settings_of_its_authors(store):
    rest = DatastoreDrafts(store, published=True)
    assert len(draft(rest, [9, 30])) == 0  # one token matches
    assert len(draft(DatastoreDrafts(store), [9, 30])) == 2
    assert (REST_PLACES, rest.max_match, CONTINUATION_LENGTH) == (5000, 16, 10)


# --- the compact form


def test_the_compact_form_drafts_what_the_full_one_drafts_after_its_ngrams(store, compact):
    drafter, full = DatastoreDrafts(compact), DatastoreDrafts(store, max_match=2)
    drafted, expected = (nodes_of(draft(each, [40, 2, 3])) for each in (drafter, full))
    assert drafted == pytest.approx(expected, rel=0.03, abs=2e-5)  # one byte each


def test_a_pickled_drafter_does_not_carry_the_tokens(tmp_path):
    documents = [np.random.default_rng(0).integers(0, VOCAB_SIZE, 50_000).tolist()]
    large = write_shards(tmp_path / "large", [documents])
    assert len(pickle.dumps(DatastoreDrafts(large))) < 2000


# --- bad input


@pytest.mark.parametrize(
    ("form", "arguments", "error", "message"),
    [
        ("store", {"max_match": 0}, ValueError, "max_match must be at least 1, but is 0"),
        ("store", {"max_match": 2.0}, TypeError, "max_match must be an int, but is 2.0"),
        ("store", {"max_match": None}, TypeError, "max_match must be an int, but is None"),
        ("store", {"max_match": 1, "published": True}, ValueError, "max_match must be at least 2"),
        ("compact", {"published": True}, ValueError, "published=True needs the full form of the"),
    ],
)
def test_bad_arguments_are_named(request, form, arguments, error, message):
    with pytest.raises(error, match=message):
        DatastoreDrafts(request.getfixturevalue(form), **arguments)


def test_a_store_beside_a_name_is_told_how_it_drafts(store):
    with pytest.raises(TypeError, match=r"write `'auto' \| rs.DatastoreDrafts\(store\)`"):
        "auto" | store
    assert (ReferenceCopy() | store).sources[1].store is store


def test_its_printed_form_names_the_store(store):
    assert repr(DatastoreDrafts(store, 4)) == f"DatastoreDrafts({store!r}, max_match=4)"


@pytest.mark.parametrize("published", [True, False])
@pytest.mark.parametrize("suffix", [-1, 10**6])
def test_a_damaged_suffix_array_is_refused(tmp_path, published, suffix):
    damaged = write_shards(tmp_path / "store", DOCUMENTS)
    entry = damaged.config.shards[1]
    suffixes = np.full(entry.tokens, suffix, np.int32)
    write_arrays(damaged.path / entry.suffixes_file.name, {"suffixes": suffixes})
    with pytest.raises(ValueError, match="the datastore is damaged"):
        draft(DatastoreDrafts(Datastore(damaged.path), published=published), [2, 3])


# --- generate


@pytest.mark.parametrize("blended", [False, True])
def test_a_store_with_an_id_outside_of_the_vocabulary_is_refused_before_any_forward_pass(
    llama, tmp_path, blended
):
    larger = write_shards(tmp_path / "store", [[[1, 2], [97]]], llama.config.vocab_size + 1)
    drafter = ReferenceCopy() | larger if blended else DatastoreDrafts(larger)
    message = r"vocabulary of 97; .*org/tokenizer"
    with passes_of(llama) as passes, pytest.raises(ValueError, match=message):
        llama.generate(torch.tensor([[1, 2, 3]]), candidate_generator=drafter, max_new_tokens=2)
    assert not passes


def test_a_datastore_is_taken_as_what_drafts_from_it(llama, store):
    blend = store | ReferenceCopy()
    for given in (store, ReferenceCopy() | store, blend):
        assert_lossless(llama, given, torch.tensor([[1, 2, 3]]))
    assert [type(source) for source in blend.sources] == [DatastoreDrafts, ReferenceCopy]
