from __future__ import annotations

from pathlib import Path

import pytest

from hf_refspec.store.datastore import Datastore
from tests.helpers.datastores import DOCUMENTS, QUIET, make_store, write_store


@pytest.fixture
def store(tmp_path) -> Path:
    """The folder of a datastore whose arrays mean nothing."""
    make_store(tmp_path / "store")
    return tmp_path / "store"


@pytest.fixture
def full(tmp_path) -> Datastore:
    return write_store(tmp_path / "store", DOCUMENTS)


@pytest.fixture
def both(full) -> Datastore:
    full.compact(**QUIET)
    return Datastore(full.path)


@pytest.fixture
def compact(full, tmp_path) -> Datastore:
    return full.compact(tmp_path / "compact", **QUIET)
