import pytest

from hf_refspec.store.datastore import Datastore
from tests.helpers.datastores import DOCUMENTS, FEW, write_store


@pytest.fixture
def full(tmp_path) -> Datastore:
    return write_store(tmp_path / "store", DOCUMENTS)


@pytest.fixture
def both(full) -> Datastore:
    full.compact(**FEW)
    return Datastore(full.path)


@pytest.fixture
def compact(full, tmp_path) -> Datastore:
    return full.compact(tmp_path / "compact", **FEW)
