"""Datastores are built and extended whole, the same in every way, or not at all."""

import os
import random
import threading
from pathlib import Path

import datasets
import numpy as np
import pytest

from hf_refspec.store.datastore import Datastore
from hf_refspec.store.datastore_config import StoreConfig
from hf_refspec.store.files import LOCK, DatastoreError
from hf_refspec.store.stored_tokenizer import tokenizer_fingerprint
from hf_refspec.version import __version__
from tests.helpers.byte_model import word_tokenizer
from tests.helpers.datastores import documents_of
from tests.helpers.full_disk import full_disk
from tests.helpers.stored import content_of, in_a_child

SMALL = {"num_proc": 1, "shard_tokens": 500}


def some_texts(count: int, seed: int = 0) -> list[str]:
    generator = random.Random(seed)
    words = ["def", "self", "return", "é", " ", "\n", "x"]
    return [" ".join(generator.choices(words, k=generator.randrange(60))) for _ in range(count)]


TEXTS = some_texts(30)


def build_store(documents, tokenizer, path, **options) -> Path:
    return Datastore.build(documents, tokenizer, path, **options).path


def extend_store(path, documents, tokenizer, **options) -> None:
    Datastore(path).add(documents, tokenizer, **options)


def texts_of(folder: Path, tokenizer) -> list[str]:
    return [tokenizer.decode(document) for document in documents_of(folder)]


@pytest.fixture
def store(tmp_path, tokenizer) -> Path:
    return build_store(TEXTS, tokenizer, tmp_path / "store", **SMALL)


def test_documents_and_their_bounds_are_kept(store, tokenizer):
    assert texts_of(store, tokenizer) == [text for text in TEXTS if text]
    config = StoreConfig.read(store)
    (shard,) = config.shards  # of more than five that were merged
    assert shard.tokens > 5 * 500
    assert config.fingerprint == tokenizer_fingerprint(tokenizer)
    assert config.vocab_size == 259
    assert config.source == {
        "corpus": "unnamed",
        "license": None,
        "deduplicated": False,
        "documents": sum(map(bool, TEXTS)),
        "hf_refspec": __version__,
    }
    names = {"config.json", *(file.name for file in config.files())}
    assert set(os.listdir(store)) == names
    assert "suffixes-00001.safetensors" not in names
    assert os.listdir(store.parent) == ["store"]


def test_what_is_said_about_the_corpus(tmp_path, tokenizer):
    dataset = datasets.Dataset.from_dict({"text": ["one", "two"]}, split="train")
    dataset.info.dataset_name, dataset.info.config_name = "poems", "long"
    dataset.info.license = "mit"
    for name, given, expected in (
        ("a", {}, ("mit", "poems long train")),
        ("b", {"license": "cc0-1.0", "corpus_name": "Numbers"}, ("cc0-1.0", "Numbers")),
    ):
        path = build_store(dataset, tokenizer, tmp_path / name, **given, **SMALL)
        source = StoreConfig.read(path).source
        assert (source["license"], source["corpus"]) == expected


def test_all_kinds_of_sources_give_the_same_bytes(tmp_path, tokenizer, store):
    texts = [text for text in TEXTS if text]
    (tmp_path / "corpus").mkdir()
    for i, text in enumerate(TEXTS):
        (tmp_path / "corpus" / f"{i:02d}.txt").write_bytes(text.encode())
    dataset = datasets.Dataset.from_dict({"text": texts})
    for i, source in enumerate(
        [
            (text for text in TEXTS),
            [tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS],
            tmp_path / "corpus",
            dataset,
            dataset.to_iterable_dataset(num_shards=3),
        ]
    ):
        options = SMALL | {"num_proc": 1 + i % 2}
        path = build_store(source, tokenizer, tmp_path / str(i), corpus_name="unnamed", **options)
        assert content_of(path) == content_of(store)


def test_the_first_tokens_of_a_corpus(tmp_path, tokenizer):
    rows = datasets.Dataset.from_dict({"text": ["abcd", "efg", "hij", "k"]})
    for most, count in ((1, 1), (5, 1), (6, 2), (9, 2), (10, 3), (100, 4)):
        store = Datastore.build(rows, tokenizer, tmp_path / str(most), max_tokens=most)
        assert store.documents == count


HUGE = "".join(some_texts(40, seed=1))


@pytest.mark.parametrize(
    ("texts", "shard_tokens", "tokens"),
    [
        (["a", HUGE, "b"], 500, len(HUGE.encode()) + 5),  # it goes on in the next shard
        *((["abc", "", "d", "efg"], shard_tokens, 10) for shard_tokens in (1, 2, 3, 4)),
    ],
)
def test_documents_end_before_at_or_after_the_end_of_a_shard(
    tmp_path, tokenizer, texts, shard_tokens, tokens
):
    options = {**SMALL, "shard_tokens": shard_tokens}
    path = build_store(texts, tokenizer, tmp_path / "store", **options)
    assert texts_of(path, tokenizer) == [text for text in texts if text]
    assert sum(shard.tokens for shard in StoreConfig.read(path).shards) == tokens


def test_a_large_vocabulary_is_kept_in_32_bits(tmp_path):
    tokenizer = word_tokenizer(f"w{i}" for i in range(70_000))
    path = build_store(["w5 w69999", [65535, 1], [7]], tokenizer, tmp_path / "store", **SMALL)
    assert documents_of(path) == [[5, 69999], [65535, 1], [7]]
    assert StoreConfig.read(path).token_dtype == np.uint32


def test_repeated_documents_are_dropped(tmp_path, tokenizer):
    texts = [*TEXTS, *TEXTS[::-1], "new", "new"]
    unique = list(dict.fromkeys(text for text in texts if text))
    options = {**SMALL, "deduplicate": True}
    path = build_store(texts, tokenizer, tmp_path / "store", **options)
    assert texts_of(path, tokenizer) == unique
    extend_store(path, ["more", *texts, "more"], tokenizer, **options)
    assert texts_of(path, tokenizer) == [*unique, "more"]
    assert StoreConfig.read(path).source["deduplicated"] is True


def interrupted():
    yield from TEXTS[:20]
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        *((source, {}, "documents has no text with a token") for source in ([], ["", ""], [[]])),
        (TEXTS, {"shard_tokens": 0}, "shard_tokens must be at least 1, but is 0"),
        (TEXTS, {"shard_tokens": 2**31}, "shard_tokens must be"),
        ([*[[1] * 99] * 20, [259]], {}, "document 20 has the id 259"),
        (interrupted(), {}, "^$"),
    ],
)
def test_a_build_that_fails_says_why_and_leaves_nothing(
    tmp_path, tokenizer, source, options, message
):
    with pytest.raises((ValueError, KeyboardInterrupt), match=message):
        build_store(source, tokenizer, tmp_path / "store", **{**SMALL, **options})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("limit", [100, 900, 1500])
def test_a_full_disk(tmp_path, tokenizer, store, limit):
    extend_store(store, [[7, 8, 9]], tokenizer, **SMALL)
    before = content_of(store)
    for run in (
        lambda: build_store(TEXTS, tokenizer, tmp_path / "other", **SMALL),
        lambda: extend_store(store, TEXTS, tokenizer, **SMALL),
        lambda: Datastore(store).merge(),
        lambda: Datastore(store).compact(),
        lambda: Datastore(store).compact(tmp_path / "other"),
        lambda: Datastore(store).save_pretrained(tmp_path / "other"),
    ):
        with full_disk(limit), pytest.raises(OSError, match="File too large"):
            run()
        assert os.listdir(tmp_path) == ["store"]
        assert content_of(store) == before


def test_two_builds_of_one_path(tmp_path, tokenizer, store):
    begun, go_on = threading.Event(), threading.Event()

    def slow():
        yield from TEXTS[:5]
        begun.set()
        assert go_on.wait(600)
        yield from TEXTS[5:]

    for write, path in (
        (lambda source: build_store(source, tokenizer, tmp_path / "other", **SMALL), None),
        (lambda source: extend_store(store, source, tokenizer, **SMALL), store),
    ):
        before = path and content_of(path)
        begun.clear(), go_on.clear()
        writer = threading.Thread(target=write, args=[slow()])
        writer.start()
        assert begun.wait(600)
        try:
            with pytest.raises(DatastoreError, match="is being written by another process"):
                write(TEXTS)
            error = in_a_child(lambda write=write: write(TEXTS))
            assert isinstance(error, DatastoreError)
            if before:
                assert StoreConfig.read(path).shards and content_of(path).items() >= before.items()
        finally:
            go_on.set()
            writer.join()
    expected = [text for text in TEXTS if text]
    assert texts_of(tmp_path / "other", tokenizer) == expected
    assert texts_of(store, tokenizer) == expected * 2
    assert not list(tmp_path.rglob(LOCK))


def test_a_small_extension_leaves_the_old_files_alone(tmp_path, tokenizer, store):
    before = {file.name: (file.stat().st_ino, file.read_bytes()) for file in store.iterdir()}
    old = StoreConfig.read(store)
    before.pop("config.json")
    more = some_texts(3, seed=3)
    extend_store(store, more, tokenizer, num_proc=1)
    assert texts_of(store, tokenizer) == [text for text in [*TEXTS, *more] if text]
    after = {file.name: (file.stat().st_ino, file.read_bytes()) for file in store.iterdir()}
    assert after.items() >= before.items()
    new = StoreConfig.read(store)
    assert new.shards[:-1] == old.shards
    assert set(after) == {"config.json", *(file.name for file in new.files())}


def test_a_failed_extension_leaves_the_store_as_it_was(tokenizer, store):
    before, other = content_of(store), word_tokenizer("a")
    both = f"{tokenizer_fingerprint(tokenizer)}.*{tokenizer_fingerprint(other)}"
    for more, known, message in (
        ([*TEXTS, [259]], tokenizer, "has the id 259"),
        ([""], tokenizer, "documents has nothing that the datastore lacks"),
        (TEXTS, other, both),
    ):
        with pytest.raises(ValueError, match=message):
            extend_store(store, more, known, **SMALL)
        assert content_of(store) == before


def test_nothing_is_shown_in_files_and_pipes(tmp_path, tokenizer, capfd):
    build_store(TEXTS, tokenizer, tmp_path / "store", **SMALL)
    assert capfd.readouterr() == ("", "")
