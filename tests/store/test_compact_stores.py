"""Datastores with only the compact form, and with one that is older than the full form."""

from __future__ import annotations

import os

import pytest

from hf_refspec.store.datastore import Datastore

QUIET = {"progress": False}
TEXTS = [
    "to be or not to be, that is the question: " * 5,
    "to err is human, to forgive divine. " * 5,
]


def test_the_compact_form_is_built_without_keeping_the_full_one(tmp_path, tokenizer):
    full = Datastore.build(TEXTS, tokenizer, tmp_path / "full", **QUIET)
    options = {"form": "compact", "max_bytes": 8000}
    store = Datastore.build(TEXTS, tokenizer, tmp_path / "store", **options, **QUIET)
    assert store.form == "compact" and not store.config.shards
    assert store.config.source == full.config.source
    same = full.compact(tmp_path / "same", max_bytes=8000, **QUIET)
    assert store.config.ngrams == same.config.ngrams
    assert sorted(os.listdir(store.path)) == sorted(os.listdir(same.path))
    assert sorted(os.listdir(tmp_path)) == ["full", "same", "store"]


def test_a_compact_build_that_fails_leaves_nothing(tmp_path, tokenizer):
    with pytest.raises(ValueError, match="document 1"):
        Datastore.build(["a text", 7], tokenizer, tmp_path / "store", form="compact", **QUIET)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_bytes": 8000}, 'max_bytes=8000 is for form="compact"'),
        ({"form": "compact", "max_bytes": 7}, "max_bytes must be at least 4096"),
        ({"form": "small"}, "small"),
    ],
)
def test_options_of_the_other_form_are_refused(tmp_path, tokenizer, options, message):
    with pytest.raises(ValueError, match=message):
        Datastore.build(TEXTS, tokenizer, tmp_path / "store", **options)
    assert os.listdir(tmp_path) == []


def test_a_compact_form_that_is_older_than_the_datastore_is_named(tmp_path, tokenizer, caplog):
    store = Datastore.build(TEXTS, tokenizer, tmp_path / "store", **QUIET)
    store.compact(**QUIET)
    assert caplog.text == ""
    before = store.tokens
    extended = store.extend(["more text"], tokenizer, **QUIET)
    stale = f"was made of {before} of its {extended.tokens} tokens; compact() it again"
    assert stale in caplog.text
    caplog.clear()
    Datastore(store.path, form="compact")
    assert stale in caplog.text
    caplog.clear()
    extended.compact(**QUIET)
    Datastore(store.path, form="compact")
    assert caplog.text == ""
