"""What a config.json may say, and that everything else is refused by name."""

import copy
import json
import os
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hf_refspec.store.datastore_config import (
    LARGEST_SHARD,
    MOST_SHARDS,
    ShardEntry,
    StoreConfig,
)
from hf_refspec.store.files import DatastoreError, FileEntry
from hf_refspec.store.stored_folder import StoredFolder
from tests.helpers.stored import CONFIG, NGRAMS, SHARD, readers


def config_of(config: StoreConfig, folder: Path) -> dict[str, Any]:
    config.write(folder)
    return json.loads((folder / "config.json").read_text())


def changed(content: dict[str, Any], place: list, value: Any) -> dict[str, Any]:
    """The content with another value in one place; `...` takes the place away."""
    content = copy.deepcopy(content)
    *outer, last = place
    inner = content
    for key in outer:
        inner = inner[key]
    if value is ...:
        del inner[last]
    else:
        inner[last] = value
    return content


def places_in(content: Any) -> list[list]:
    """Where all the values are, at any depth, but those that are for people."""
    pairs = content.items() if isinstance(content, dict) else enumerate(content)
    found = []
    for key, value in pairs:
        found.append([key])
        if isinstance(value, (dict, list)) and key != "source":
            found += [[key, *inner] for inner in places_in(value)]
    return found


def refusal(folder: Path, text: str | bytes | None = None) -> str:
    """The message with which a folder's config.json is refused."""
    if text is not None:
        text = text.encode() if isinstance(text, str) else text
        (folder / "config.json").write_bytes(text)
    with pytest.raises(DatastoreError) as error:
        StoreConfig.read(folder)
    message = str(error.value)
    assert str(folder) in message and len(message) < 1000
    return message


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        StoreConfig("f", "", 1, {}, [SHARD]),
        StoreConfig("", "t", 2**31 - 1, {}, [], NGRAMS),
    ],
)
def test_config_comes_back_as_it_was_written(tmp_path, config):
    config.write(tmp_path)
    assert StoreConfig.read(tmp_path) == config
    assert os.listdir(tmp_path) == ["config.json"]


def test_separator_is_no_token():
    for vocab_size, bits in ((1, 16), (2**16 - 1, 16), (2**16, 32), (2**31 - 1, 32)):
        config = StoreConfig("f", "t", vocab_size)
        assert (config.token_dtype, config.separator) == (np.dtype(f"u{bits // 8}"), 2**bits - 1)


NAMES = ["", "5", "..", "../tokens-00001.safetensors", "/etc/passwd", "tokens-00001.pickle"]
NAMES += ["tokens-00001.safetensors\n", "tokens-00001.safetensors\0", "tokens-٠٠٠٠١.safetensors"]


def test_every_place_in_config_refuses_all_that_does_not_belong_there(tmp_path):
    content = config_of(CONFIG, tmp_path)
    strange = [..., -1, -(10**30), 2**63, 10**400, 1.5, float("nan"), float("inf"), True, False]
    strange += [*NAMES, [], [[]], {}, {"name": 1}, None]
    accepted = []
    for place in places_in(content):
        for value in strange:
            (tmp_path / "config.json").write_text(json.dumps(changed(content, place, value)))
            try:
                StoreConfig.read(tmp_path)
            except DatastoreError as error:
                assert "config.json" in str(error)
            else:
                accepted.append((".".join(map(str, place)), value))
    texts = ["fingerprint", "tokenizer", "ngrams.file.sha256", "tokenizer_file.sha256"]
    texts += [f"shards.0.{kind}_file.sha256" for kind in ("tokens", "suffixes")]
    fine = [(place, value) for place in texts for value in NAMES]
    fine += [("source", {}), ("source", {"name": 1})]
    fine += [("shards", []), ("shards.0", ...)]  # The other form is left.
    optional = "ngrams", "tokenizer_file", "names_file"
    fine += [(place, value) for place in optional for value in (None, ...)]
    fine += [("ngrams.ngrams.0", ...), ("ngrams.ngrams.1", ...)]  # The arrays will not fit.
    assert sorted(map(str, accepted)) == sorted(map(str, fine))


NO_JSON = ["", "{", b"\xff\xfe\xfd", b'{"format_version": 1, "tokenizer": "\xe9"}', "[" * 100_000]
NO_JSON += ['{"a":' * 100_000, '{"format_version": ' + "9" * 5000 + "}"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((text, "it is not JSON") for text in NO_JSON),
        *(
            (t, "it has {}, not {'kind': 'datastore', 'format_version': 1}")
            for t in ("[]", "null", "{}", '"format_version"')
        ),
        ('{"kind": "datastore", "format_version": 1}', "it does not name"),
        ('{"kind": "recycling table", "format_version": 1}', "'recycling table', not 'datastore'"),
        (
            '{"format_version": 1, "format_version": 7}',
            "has {'format_version': 7}, not {'kind': 'datastore', 'format_version': 1}; install",
        ),
    ],
)
def test_what_is_no_config_is_refused(tmp_path, text, message):
    assert message in refusal(tmp_path, text)


@pytest.mark.parametrize("depth", [30, 300, 900, 960, 990])
def test_deep_nesting_is_refused_everywhere(tmp_path, depth):
    # Not as deep as Python's reader of JSON can go, but perhaps deeper than what comes after it.
    content = config_of(CONFIG, tmp_path)
    for key in content:
        text = json.dumps(content | {key: "deep"})
        for nested in ("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth):
            refusal(tmp_path, text.replace('"deep"', nested))


def test_config_that_is_too_large_is_not_read(tmp_path):
    with open(tmp_path / "config.json", "wb") as file:
        file.truncate(1 << 40)
    tracemalloc.start()
    assert "is too large" in refusal(tmp_path)
    assert tracemalloc.get_traced_memory()[1] < 20e6
    tracemalloc.stop()


def test_more_shards_than_can_be_mapped_are_neither_read_nor_written(tmp_path):
    def file(kind: str, i: int) -> FileEntry:
        return FileEntry(f"{kind}-{i:05}.safetensors", 2**31, "a" * 64)

    shards = [
        ShardEntry(LARGEST_SHARD, LARGEST_SHARD, file("tokens", i), file("suffixes", i))
        for i in range(MOST_SHARDS + 1)
    ]
    message = "shards has 30001 entries, more than 30000"
    with pytest.raises(DatastoreError, match=rf"config.json cannot be written: {message}"):
        replace(CONFIG, shards=shards).write(tmp_path)
    replace(CONFIG, shards=shards[:-1]).write(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    content["shards"].append(content["shards"][0])
    assert message in refusal(tmp_path, json.dumps(content))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"shards": [SHARD, SHARD]}, "it names a file twice"),
        ({"shards": [], "ngrams": None}, "it names neither shards nor n-grams"),
        ({"tokenizer_file": replace(SHARD.tokens_file, name="../x")}, "is not the name of a token"),
        ({"source": {"corpus": "x" * (1 << 24)}}, "it would have .* bytes, more than"),
        ({"source": {"corpus": Path("x")}}, "is not JSON serializable"),
    ],
)
def test_what_could_not_be_read_again_is_not_written(tmp_path, changes, message):
    CONFIG.write(tmp_path)
    with pytest.raises(DatastoreError, match=f"config.json cannot be written: .*{message}"):
        replace(CONFIG, **changes).write(tmp_path)
    assert StoreConfig.read(tmp_path) == CONFIG
    assert os.listdir(tmp_path) == ["config.json"]


def test_a_config_that_is_replaced_while_its_files_are_opened_is_read_again(tmp_path):
    CONFIG.write(tmp_path)
    seen = []

    class Folder(StoredFolder[StoreConfig]):
        config_type = StoreConfig

        def _open(self, config: StoreConfig) -> None:
            seen.append(config.vocab_size)
            if len(seen) < 3:  # another process replaces it, and deletes what this one names
                replace(CONFIG, vocab_size=300 + len(seen)).write(tmp_path)
            if len(seen) != 3:
                raise DatastoreError("a file is missing")

    assert Folder(tmp_path).config.vocab_size == 302 and seen == [300, 301, 302]
    with pytest.raises(DatastoreError, match="a file is missing"):
        Folder(tmp_path)


def test_no_datastore_there(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path, tmp_path / "nowhere", tmp_path / "file"):
        with pytest.raises(DatastoreError, match=f"{folder} is not a datastore: it has no config"):
            StoreConfig.read(folder)


@pytest.mark.parametrize(
    "make",
    [os.mkdir, os.mkfifo, lambda path: path.symlink_to("/dev/zero")],
    ids=["folder", "pipe", "zeros"],
)
def test_what_is_no_file_is_refused_and_never_waited_for(tmp_path, make):
    make(tmp_path / "config.json")
    assert "config.json is not a file" in refusal(tmp_path)
    make(tmp_path / SHARD.tokens_file.name)
    for read in readers(tmp_path, SHARD.tokens_file):
        with pytest.raises(DatastoreError, match=r"tokens-00001.safetensors is not a file"):
            read()
