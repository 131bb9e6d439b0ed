"""Folders that one may only read: they open and serve, and whoever changes them is told at once."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hf_refspec.drafting.calls import drafter_call
from hf_refspec.drafting.contract import Call
from hf_refspec.drafting.datastore_drafts import DatastoreDrafts
from hf_refspec.store.datastore import Datastore

pytestmark = pytest.mark.skipif(os.name == "nt", reason="folders are not protected so there")
NOBODY = 65534
TEXTS = ["the cat sat on the mat", "the cat sat on the hat"]


@pytest.fixture
def place(tokenizer) -> Iterator[Path]:
    """A folder with a datastore, read by a user who may not write into them."""
    place = Path(tempfile.mkdtemp())  # other users can get into this one
    Datastore.build(TEXTS, tokenizer, place / "full")
    for folder in (place, place / "full"):
        folder.chmod(0o555)
    root = os.geteuid() == 0
    if root:
        os.seteuid(NOBODY)
    yield place
    if root:
        os.seteuid(0)
    for folder in (place, place / "full"):
        folder.chmod(0o755)
    shutil.rmtree(place)


def test_it_is_read(place, tokenizer):
    store = Datastore(place / "full", tokenizer=tokenizer)
    store.verify()
    drafter = DatastoreDrafts(store)
    with drafter_call(drafter, [np.array(tokenizer("the cat")["input_ids"])], 259):
        assert len(drafter.draft(8, Call())) == 8


def test_it_is_not_changed_and_no_work_is_done(place, tokenizer):
    def unread() -> Iterator[str]:
        raise AssertionError
        yield

    store = Datastore(place / "full")
    for change, path in (
        (lambda: store.add(unread(), tokenizer), store.path),
        (lambda: store.merge(), store.path),
        (lambda: store.compact(), store.path),
        (lambda: store.record({}), store.path),
    ):
        with pytest.raises(PermissionError, match=f"^{path} cannot be changed: .* save_pretrained"):
            change()
    with pytest.raises(PermissionError):
        Datastore.build(TEXTS, tokenizer, place / "new")
    assert os.listdir(place) == ["full"]
