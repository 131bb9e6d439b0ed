"""Damaged files of every kind of stored folder are found, and how long ago is noted."""

from __future__ import annotations

import shutil
from datetime import datetime, timedelta, timezone

import pytest
from texts import bag_of_words, some_texts

import hf_refspec as rs

TEXTS = some_texts(30)
FILES = [
    *(("datastore", pattern) for pattern in ("tokens-*", "suffixes-*", "ngrams-*", "tokenizer.*")),
    *(("passages", pattern) for pattern in ("passages.*", "sources.*", "embeddings.*")),
    ("knn", "entries.*"),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory, tokenizer, byte_llama):
    """A folder of each kind, and what opens it."""
    root, quiet = tmp_path_factory.mktemp("verified"), {"progress": False}
    rs.Datastore.build(TEXTS, tokenizer, root / "datastore", **quiet).compact(**quiet)
    rs.KnowledgeBase.build(TEXTS, tokenizer, bag_of_words, root / "passages", **quiet)
    rs.KnnDatastore.build(byte_llama, tokenizer, TEXTS, root / "knn", **quiet)
    opened = {"passages": lambda path: rs.KnowledgeBase(path, tokenizer)}
    return root, opened | {"datastore": rs.Datastore, "knn": rs.KnnDatastore}


@pytest.mark.parametrize(("kind", "pattern"), FILES)
def test_damage_to_any_file_is_found_and_when_there_was_none_is_noted(
    folders, tmp_path, kind, pattern
):
    root, opened = folders
    path = shutil.copytree(root / kind, tmp_path / "copy")
    stored = opened[kind](path)
    assert stored.verified is None
    stored.verify()
    assert timedelta(0) <= datetime.now(timezone.utc) - stored.verified < timedelta(hours=1)
    assert opened[kind](path).verified == stored.verified
    stored.save_pretrained(tmp_path / "saved")
    assert opened[kind](tmp_path / "saved").verified is None
    (file,) = path.glob(pattern)
    content = bytearray(file.read_bytes())
    middle = slice(len(content) // 2, len(content) // 2 + 238)
    content[middle] = bytes(byte ^ 0xFF for byte in content[middle])
    file.write_bytes(content)
    damaged = f"{file.name} is damaged: its checksum is"
    with pytest.raises(rs.DatastoreError, match=damaged):
        stored.verify()
    assert stored.verified is None
    if kind == "passages" or pattern == "entries.*":  # a small file that decides on the text
        with pytest.raises(rs.DatastoreError, match=damaged):
            opened[kind](path)


def test_what_was_replaced_since_was_not_verified(tmp_path, tokenizer):
    store = rs.Datastore.build(TEXTS, tokenizer, tmp_path / "store", progress=False)
    store.verify()
    before = rs.Datastore(store.path)
    store.add(["more"], tokenizer, progress=False)
    assert before.verified is not None and store.verified is None
