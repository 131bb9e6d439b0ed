"""Folders that one may only read: they open and serve, and whoever changes them is told at once."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import hf_refspec as rs
from hf_refspec.drafting.calls import drafter_call
from hf_refspec.drafting.datastore_drafts import DatastoreDrafts

pytestmark = pytest.mark.skipif(os.name == "nt", reason="folders are not protected so there")
NOBODY = 65534
TEXTS = ["the cat sat on the mat", "the cat sat on the hat"]
QUIET = {"progress": False}


@pytest.fixture
def place(byte_llama, tokenizer) -> Iterator[Path]:
    """A folder with one of each kind, read by a user who may not write into them."""
    place = Path(tempfile.mkdtemp())  # other users can get into this one
    rs.Datastore.build(TEXTS, tokenizer, place / "full", **QUIET)
    rs.KnowledgeBase.build(TEXTS, tokenizer, None, place / "base", **QUIET)
    rs.KnnDatastore.build(byte_llama, tokenizer, TEXTS, place / "knn", **QUIET)
    rs.TokenRecycling.build(byte_llama, tokenizer, TEXTS, **QUIET).save_pretrained(place / "table")
    for folder in (place, *place.iterdir()):
        folder.chmod(0o555)
    root = os.geteuid() == 0
    if root:
        os.seteuid(NOBODY)
    yield place
    if root:
        os.seteuid(0)
    for folder in (place, *place.iterdir()):
        folder.chmod(0o755)
    shutil.rmtree(place)


def test_it_is_read(place, tokenizer):
    store = rs.Datastore(place / "full", tokenizer=tokenizer)
    store.verify()
    drafter = DatastoreDrafts(store)
    with drafter_call(drafter, [np.array(tokenizer("the cat")["input_ids"])], 259):
        assert len(drafter.draft(8)) == 8
    assert rs.KnowledgeBase(place / "base", tokenizer).text(0) == TEXTS[0]
    states = np.zeros((1, 32), np.float32)
    assert len(rs.KnnDatastore(place / "knn").search(list(states), 3)[0]) == 3
    assert len(rs.TokenRecycling.from_pretrained(place / "table", tokenizer)) > 0


def test_it_is_not_changed_and_no_work_is_done(place, tokenizer):
    def unread() -> Iterator[str]:
        raise AssertionError
        yield

    store = rs.Datastore(place / "full")
    for change, path in (
        (lambda: store.extend(unread(), tokenizer, **QUIET), store.path),
        (lambda: store.merge(**QUIET), store.path),
        (lambda: store.compact(**QUIET), store.path),
    ):
        with pytest.raises(PermissionError, match=f"^{path} cannot be changed: .* save_pretrained"):
            change()
    with pytest.raises(PermissionError):
        rs.Datastore.build(TEXTS, tokenizer, place / "new", **QUIET)
    assert sorted(each.name for each in place.iterdir()) == ["base", "full", "knn", "table"]
