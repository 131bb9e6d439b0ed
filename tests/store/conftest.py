from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from datastores import DOCUMENTS, QUIET, write_store

from hf_refspec.store import files
from hf_refspec.store.datastore import Datastore


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


@pytest.fixture
def replaced_when_opened(monkeypatch) -> Callable[[str, bytes], None]:
    """Lets a file be replaced by another one as soon as it is open."""

    def replace(name: str, content: bytes) -> None:
        def opened(path: Path, follow_links: bool = True):
            file = open_file(path, follow_links)
            if path.name == name:
                path.with_name("other").write_bytes(content)
                path.with_name("other").replace(path)
            return file

        open_file = files.open_file
        monkeypatch.setattr(files, "open_file", opened)

    return replace
