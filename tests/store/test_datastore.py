"""Datastores that are opened, verified, copied and compacted, whatever goes wrong meanwhile."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import random
import resource
import shutil
import signal
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from hf_refspec.drafting.datastore_drafts import DatastoreDrafts
from hf_refspec.index.suffix_array import build_suffix_array
from hf_refspec.store.build.corpus import BuildOptions
from hf_refspec.store.build.shard_writer import ShardWriter
from hf_refspec.store.card import card
from hf_refspec.store.datastore import Datastore
from hf_refspec.store.datastore_config import LARGEST_SHARD, NgramsEntry, ShardEntry, StoreConfig
from hf_refspec.store.files import DatastoreError, FileEntry, write_arrays
from hf_refspec.store.fingerprint import tokenizer_fingerprint
from hf_refspec.store.shards import split_documents

QUIET = {"max_ngram": 2, "ngrams_per_order": 20, "progress": False}
FINGERPRINT = "f" * 32
NGRAM_ARRAYS = ("keys", "slots", "starts", "node_tokens", "node_parents", "node_probs")


def some_documents(vocab_size: int = 300, seed: int = 0) -> list[list[int]]:
    """Documents with much in common, an empty one among them."""
    generator = random.Random(seed)
    words = [generator.choices(range(vocab_size), k=generator.randint(1, 6)) for _ in range(12)]
    chosen = [generator.choices(words, k=9) for _ in range(20)]
    documents = [[token for word in some for token in word] for some in chosen]
    return [*documents, [], [vocab_size - 1]]


def write_store(
    folder: Path,
    documents: list[list[int]],
    vocab_size: int = 300,
    cuts: tuple[int, ...] = (330,),
    fingerprint: str = FINGERPRINT,
) -> Datastore:
    """Writes a datastore by hand, its text cut into shards at the given places."""
    folder.mkdir()
    config = StoreConfig(fingerprint, "org/tokenizer", vocab_size, {"corpus": "x"})
    text = [token for document in documents for token in [*document, config.separator]]
    shards = []
    for i, (start, end) in enumerate(zip((0, *cuts), (*cuts, len(text)), strict=True), start=1):
        tokens = np.array(text[start:end], config.token_dtype)
        arrays = {"tokens": tokens, "suffixes": build_suffix_array(tokens)}
        files = [
            write_arrays(folder / f"{name}-{i:05d}.safetensors", {name: array})
            for name, array in arrays.items()
        ]
        shards.append(ShardEntry(len(tokens), text[start:end].count(config.separator), *files))
    replace(config, shards=shards).write(folder)
    return Datastore(folder)


def write_table(folder: Path, arrays: dict[str, np.ndarray], counts: list[int]) -> Datastore:
    """Writes a datastore of only these n-grams and opens it."""
    folder.mkdir()
    file = write_arrays(folder / "ngrams-0123456789ab.safetensors", arrays)
    ngrams = NgramsEntry(counts, len(arrays["node_tokens"]), 1, file)
    StoreConfig(FINGERPRINT, "org/tokenizer", 300, {}, [], ngrams).write(folder)
    return Datastore(folder)


def write_sparse(path: Path, name: str, dtype: str, length: int) -> FileEntry:
    """A file of zeros that takes no room on the disk."""
    size = length * int(dtype[1:]) // 8
    header = json.dumps({name: {"dtype": dtype, "shape": [length], "data_offsets": [0, size]}})
    header += " " * (-len(header) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header.encode())
        file.truncate(file.tell() + size)
    return FileEntry(path.name, path.stat().st_size, "")


def content_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def drafts_of(store: Datastore) -> list[tuple[list, list, list]]:
    drafter = DatastoreDrafts(store)
    drafts = []
    for token in range(300):
        drafter.begin(np.array([token]), 300)
        tree = drafter.draft(16)
        tree.checked(300)
        drafts.append((tree.tokens.tolist(), tree.parents.tolist(), tree.probs.tolist()))
    assert any(tokens for tokens, _, _ in drafts)
    return drafts


def in_a_child(function: Callable[[], None], kill_after: float | None = None) -> Exception | None:
    """Runs a function in another process, which may be killed.

    Returns:
        What it raised.
    """
    receiver, sender = multiprocessing.Pipe(duplex=False)
    child = os.fork()
    if child == 0:
        error = None
        try:
            function()
        except Exception as raised:
            error = type(raised)(str(raised))
        sender.send(error)
        os._exit(0)
    sender.close()
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)
    try:
        return receiver.recv()
    except EOFError:
        return None
    finally:
        os.waitpid(child, 0)


def seconds_in_a_child(function: Callable[[], object]) -> float:
    """What a function takes in another process, its start included."""
    start = time.monotonic()
    assert in_a_child(lambda: function() and None) is None
    return time.monotonic() - start


def memory() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


DOCUMENTS = some_documents()


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


def test_each_form_is_opened_where_it_is(full, both, compact):
    assert (full.form, full.ngrams, len(full.shards)) == ("full", None, 2)
    assert both.form == Datastore(both.path, "full").form == "full"
    opened = Datastore(both.path, form="compact")
    for each in (opened, compact, Datastore(compact.path), Datastore(compact.path, "compact")):
        assert (each.form, each.shards) == ("compact", [])
        assert len(each.ngrams) == sum(each.config.ngrams.ngrams)
        assert drafts_of(each) == drafts_of(compact)
    assert (both.tokens, both.documents) == (sum(map(len, DOCUMENTS)) + 22, 22)
    assert (compact.tokens, compact.documents) == (0, 0)
    assert compact.config.ngrams.corpus_tokens == both.tokens
    assert repr(both) == (
        f"Datastore('{both.path}', form='full', tokens={both.tokens:,}, "
        f"documents={both.documents}, tokenizer={both.config.tokenizer!r})"
    )


def test_a_form_that_is_missing_is_named(full, compact):
    with pytest.raises(DatastoreError, match=r"has no compact form; make it with compact\(\)"):
        Datastore(full.path, form="compact")
    with pytest.raises(DatastoreError, match='has only the compact form; open it with form="co'):
        Datastore(compact.path, form="full")


@pytest.mark.parametrize("form", ["", "rest", "FULL", 1, True, [], ("full",)])
def test_a_form_that_there_is_not_is_refused(full, form):
    with pytest.raises(ValueError, match=r"form must be one of \('full', 'compact'\), but is"):
        Datastore(full.path, form=form)


def test_another_tokenizer_is_refused_with_both_fingerprints(tmp_path, full, tokenizer):
    fingerprint = tokenizer_fingerprint(tokenizer)
    with pytest.raises(DatastoreError, match=rf"org/tokenizer.*{FINGERPRINT}.*{fingerprint}"):
        Datastore(full.path, tokenizer=tokenizer)
    options = {"fingerprint": fingerprint, "vocab_size": len(tokenizer)}
    documents = [[token % len(tokenizer) for token in document] for document in DOCUMENTS]
    write_store(tmp_path / "right", documents, **options)
    Datastore(tmp_path / "right", tokenizer=tokenizer)


def test_more_ids_than_the_tokenizer_has_are_refused(tmp_path, tokenizer):
    store = Datastore.build(["a text"], tokenizer, tmp_path / "store", progress=False)
    replace(store.config, vocab_size=260).write(store.path)
    message = rf"{store.path} is damaged: its vocab_size is 260, but its tokenizer has 259 ids"
    for use in (
        lambda: Datastore(store.path, tokenizer=tokenizer),
        lambda: Datastore(store.path).load_tokenizer(),
        lambda: store.extend(["more"], tokenizer, progress=False),
    ):
        with pytest.raises(DatastoreError, match=message):
            use()


def test_a_smaller_vocabulary_is_refused(full):
    message = rf"{full.path} has tokens up to 299, outside of the target model's"
    with pytest.raises(DatastoreError, match=message):
        DatastoreDrafts(full).begin(np.array([1]), 299)


def test_files_that_do_not_belong_together_are_told_with_the_path(both):
    for file in both.path.glob("suffixes-*"):
        suffixes = load_file(file)["suffixes"]
        suffixes[::2] += 10_000
        save_file({"suffixes": suffixes}, file)
    file = both.path / both.config.ngrams.file.name
    arrays = load_file(file)
    save_file(arrays | {"starts": arrays["starts"] + 100_000}, file)
    message = rf"{both.path}: the datastore is damaged: .*verify\(\) tells which file it is"
    for form in ("full", "compact"):
        drafter = DatastoreDrafts(Datastore(both.path, form))
        with (
            drafter.session(np.array(DOCUMENTS[0][:3]), 300),
            pytest.raises(DatastoreError, match=message),
        ):
            drafter.draft(16)


@pytest.mark.parametrize("mat", [10**400, {"x": 10**400}, {"x": float("nan")}, {"x": "y"}, ["x"]])
def test_a_card_can_be_written_whatever_the_config_says_was_measured(full, mat):
    assert "has not been measured" in card(replace(full.config, source={"mat": mat}), "org/x")


@pytest.mark.parametrize("noted", [0, -1, 2**31, "300", None, True])
def test_an_extension_needs_no_size_of_shards_that_the_config_has_noted(tmp_path, tokenizer, noted):
    options = {"num_proc": 1, "progress": False}
    store = Datastore.build(["a text"], tokenizer, tmp_path / "store", **options)
    replace(store.config, source={"shard_tokens": noted}).write(store.path)
    assert store.extend(["another"], tokenizer, **options).documents == 2


@pytest.mark.parametrize("noted", [1, LARGEST_SHARD])
def test_an_extension_takes_no_memory_and_writes_no_files_for_a_size_that_was_noted(
    tmp_path, tokenizer, noted, monkeypatch
):
    store = Datastore.build(["a text"], tokenizer, tmp_path / "store", progress=False)
    replace(store.config, source={"shard_tokens": noted}).write(store.path)
    taken: list[int] = []
    begin = ShardWriter._begin
    monkeypatch.setattr(
        ShardWriter, "_begin", lambda writer: (taken.append(writer.shard_tokens), begin(writer))
    )
    store.extend(["another"], tokenizer, progress=False)
    assert taken == [BuildOptions.shard_tokens] * 2


def test_a_fingerprint_of_any_length_is_shown_in_a_short_message(tmp_path, tokenizer):
    write_store(tmp_path / "store", DOCUMENTS, fingerprint="f" * 100_000)
    with pytest.raises(DatastoreError, match="made for another tokenizer") as refused:
        Datastore(tmp_path / "store", tokenizer=tokenizer)
    assert len(str(refused.value)) < 1000


def test_a_pickle_opens_the_same_files(both, monkeypatch, tmp_path):
    for store in (both, Datastore(both.path, "compact")):
        copied = pickle.dumps(store)
        assert len(copied) < 1000
        copy = pickle.loads(copied)
        assert (copy.form, copy.config) == (store.form, store.config)
        assert drafts_of(copy) == drafts_of(store)
    monkeypatch.chdir(both.path.parent)
    copied = pickle.dumps(Datastore("store"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert pickle.loads(copied).config == both.config


@pytest.mark.parametrize("cuts", [(), (330,), (1, 2, 3), (40, 41, 600)])
@pytest.mark.parametrize("block", [1, 2, 7, 100, 1 << 20])
def test_documents_come_back_wherever_shards_and_blocks_end(tmp_path, cuts, block):
    store = write_store(tmp_path / "store", DOCUMENTS, cuts=cuts)
    texts = [shard.tokens for shard in store.shards]
    found = split_documents(texts, store.config.separator, block)
    assert [document.tolist() for document in found] == DOCUMENTS
    assert [document.tolist() for document in store.iter_documents()] == DOCUMENTS


def test_documents_of_a_large_vocabulary_come_back(tmp_path):
    documents = [*some_documents(70_000), [65_535, 65_536, 69_999]]
    store = write_store(tmp_path / "store", documents, 70_000)
    assert [document.tolist() for document in store.iter_documents()] == documents


def test_text_behind_the_last_separator_is_a_document(tmp_path):
    store = write_store(tmp_path / "store", DOCUMENTS, cuts=(100, 300))
    config = replace(store.config, shards=store.config.shards[:2])
    config.write(store.path)
    separated = [*map(np.ndarray.tolist, Datastore(store.path).iter_documents())]
    whole = len(separated) - 1
    assert separated[:whole] == DOCUMENTS[:whole]
    assert separated[whole] == DOCUMENTS[whole][: len(separated[whole])]


def test_a_sound_datastore_is_verified(full, both, compact):
    for store in (full, both, compact, Datastore(both.path, "compact")):
        store.verify()


def test_a_flipped_bit_in_any_file_is_found(both):
    for entry in both.config.files():
        path = both.path / entry.name
        good = path.read_bytes()
        for place in (0, 9, len(good) // 2, len(good) - 1):
            bad = bytearray(good)
            bad[place] ^= 16
            path.write_bytes(bad)
            with pytest.raises(DatastoreError, match=rf"{entry.name} is damaged: its checksum"):
                both.verify()
        path.write_bytes(good)
        both.verify()


def test_verifying_reads_what_is_open_and_never_waits(both):
    compact = Datastore(both.path, "compact")
    path = both.path / both.config.shards[0].tokens_file.name
    path.unlink()
    compact.verify()
    ngrams = both.path / both.config.ngrams.file.name
    ngrams.unlink()
    os.mkfifo(ngrams)
    with pytest.raises(DatastoreError, match=f"{ngrams.name} is not a file"):
        compact.verify()


@pytest.mark.parametrize("kind", ["tokens", "suffixes", "ngrams"])
def test_a_missing_or_cut_or_grown_file_is_named(both, kind):
    (path, *_) = sorted(both.path.glob(f"{kind}-*"))
    good = path.read_bytes()
    form = "compact" if kind == "ngrams" else "full"
    for bad in (b"", good[:20], good[:-1], good + b"\0"):
        path.write_bytes(bad)
        with pytest.raises(DatastoreError, match=rf"{path.name} is damaged: it has {len(bad)} b"):
            Datastore(both.path, form)
    path.unlink()
    with pytest.raises(DatastoreError, match=rf"{path.name} .* missing"):
        Datastore(both.path, form)


def test_a_damaged_header_is_refused(both):
    path = both.path / "suffixes-00002.safetensors"
    content = bytearray(path.read_bytes())
    content[9] ^= 1
    path.write_bytes(content)
    with pytest.raises(DatastoreError, match=f"{path.name} is damaged"):
        Datastore(both.path, "full")


def test_swapped_shards_are_refused(both):
    for kind in ("tokens", "suffixes"):
        one, two = (both.path / f"{kind}-0000{i}.safetensors" for i in (1, 2))
        one.rename(both.path / "other")
        two.rename(one)
        (both.path / "other").rename(two)
        with pytest.raises(DatastoreError, match=rf"{kind}-0000. *"):
            Datastore(both.path, "full")
        one.rename(both.path / "other")
        two.rename(one)
        (both.path / "other").rename(two)
    Datastore(both.path, "full").verify()


@pytest.mark.parametrize("length", [0, 3, 6, 1000])
def test_slots_that_are_no_power_of_two_are_refused(compact, tmp_path, length):
    arrays = load_file(compact.path / compact.config.ngrams.file.name)
    arrays["slots"] = np.resize(arrays["slots"], length)
    with pytest.raises(DatastoreError, match=rf"damaged: slots has {length} entries, no power"):
        write_table(tmp_path / "other", arrays, compact.config.ngrams.ngrams)


def test_a_copy_has_what_is_open(both, tmp_path):
    both.save_pretrained(tmp_path / "a")
    assert content_of(tmp_path / "a") == content_of(both.path)
    copy = Datastore(tmp_path / "a")
    copy.verify()
    assert copy.config == both.config
    Datastore(both.path, "compact").save_pretrained(tmp_path / "b" / "c")
    copy = Datastore(tmp_path / "b" / "c")
    copy.verify()
    assert (copy.form, copy.config.shards) == ("compact", [])
    assert len(content_of(copy.path)) == 2


def test_a_copy_replaces_nothing(full, tmp_path):
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path, tmp_path / "file", full.path):
        with pytest.raises(FileExistsError, match="exists; choose another path"):
            full.save_pretrained(path)
        with pytest.raises(FileExistsError, match="exists; choose another path"):
            full.compact(path, **QUIET)
    assert sorted(os.listdir(tmp_path)) == ["file", "store"]


def make_zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def make_longer(path: Path) -> None:
    path.write_bytes(bytes(100_000))


@pytest.mark.parametrize("make", [make_zeros, os.mkfifo, make_longer, lambda path: None])
def test_a_copy_that_fails_leaves_nothing(both, tmp_path, make):
    path = both.path / both.config.ngrams.file.name
    path.unlink()
    make(path)
    with pytest.raises(DatastoreError, match=path.name):
        both.save_pretrained(tmp_path / "a")
    assert os.listdir(tmp_path) == ["store"]


def test_compacting_in_place_again_removes_the_older_form(full):
    before = content_of(full.path)
    for count in (20, 10, 20):
        # The same object each time, which was opened before there was a compact form.
        new = full.compact(max_ngram=2, ngrams_per_order=count, progress=False)
        new.verify()
        Datastore(full.path).verify()
        now = content_of(full.path)
        assert set(now) == {*before, new.config.ngrams.file.name}
        assert {name: now[name] for name in before if name != "config.json"} == {
            name: before[name] for name in before if name != "config.json"
        }


def test_compacting_removes_what_a_process_was_killed_over(full):
    first = full.compact(max_ngram=2, ngrams_per_order=20, progress=False)
    names = {*content_of(full.path)}
    # Killed after config.json named the newer form, before the older one was deleted.
    for name in ("ngrams-0123456789ab.safetensors", ".ngrams.safetensors.new"):
        shutil.copy(full.path / first.config.ngrams.file.name, full.path / name)
    full.compact(max_ngram=2, ngrams_per_order=20, progress=False)
    assert {*content_of(full.path)} == names


def test_compacting_in_place_twice_with_one_result_keeps_the_file(full):
    first = full.compact(**QUIET)
    again = full.compact(**QUIET)
    assert first.config == again.config
    again.verify()


def test_who_has_the_older_compact_form_open_goes_on(full):
    reader = full.compact(**QUIET)
    wanted = drafts_of(reader)
    other = full.compact(max_ngram=1, ngrams_per_order=3, progress=False)
    assert not (full.path / reader.config.ngrams.file.name).exists()
    assert drafts_of(reader) == wanted != drafts_of(other)


def test_compacting_keeps_shards_that_were_added_meanwhile(full, tmp_path):
    more = write_store(tmp_path / "more", some_documents(seed=1), cuts=())
    shard = more.config.shards[0]
    files = []
    for file in (shard.tokens_file, shard.suffixes_file):
        name = file.name.replace("00001", "00003")
        (more.path / file.name).rename(full.path / name)
        files.append(replace(file, name=name))
    added = replace(shard, tokens_file=files[0], suffixes_file=files[1])
    replace(full.config, shards=[*full.config.shards, added]).write(full.path)
    compact = full.compact(**QUIET)
    assert compact.config.shards == [*full.config.shards, added]
    assert compact.config.ngrams.corpus_tokens == full.tokens
    Datastore(full.path).verify()


def test_compacting_in_place_refuses_a_datastore_that_was_replaced(full):
    replace(full.config, shards=full.config.shards[1:]).write(full.path)
    before = content_of(full.path)
    with pytest.raises(DatastoreError, match="has been replaced meanwhile; open it again"):
        full.compact(**QUIET)
    assert content_of(full.path) == before


def test_compacting_needs_the_full_form_and_sound_numbers(full, compact):
    with pytest.raises(ValueError, match="needs the full form, but only the compact one is open"):
        compact.compact(**QUIET)
    for options, message in (
        ({"max_ngram": 0}, "max_ngram must be from 1 to 8, but is 0"),
        ({"max_ngram": 9}, "max_ngram must be from 1 to 8, but is 9"),
        ({"ngrams_per_order": 0}, "ngrams_per_order must be at least 1, but is 0"),
        ({"max_bytes": 4095}, "max_bytes must be at least 4096, but is 4095"),
    ):
        with pytest.raises(ValueError, match=message):
            full.compact(**options)


@pytest.mark.parametrize("document", [[7], [1, 2, 3]])
def test_a_corpus_with_nothing_common_has_an_empty_compact_form(tmp_path, document):
    store = write_store(tmp_path / "store", [document], cuts=())
    compact = store.compact(progress=False)
    compact.verify()
    assert len(compact.ngrams) == 0
    drafter = DatastoreDrafts(compact)
    drafter.begin(np.array(document), 300)
    assert len(drafter.draft(16)) == 0


def test_compacting_damaged_shards_raises_and_changes_nothing(full):
    length = full.config.shards[0].tokens
    for suffixes in (np.full(length, -1), np.full(length, 2**31 - 1), np.full(length, length)):
        file = write_arrays(
            full.path / "suffixes-00001.safetensors", {"suffixes": suffixes.astype(np.int32)}
        )
        shards = [replace(full.config.shards[0], suffixes_file=file), full.config.shards[1]]
        replace(full.config, shards=shards).write(full.path)
        before = content_of(full.path)
        with pytest.raises(ValueError, match="is damaged: its suffix array"):
            Datastore(full.path).compact(**QUIET)
        assert content_of(full.path) == before


def test_compacting_in_place_killed_at_any_moment_leaves_a_sound_datastore(both):
    def again_and_again() -> None:
        store = Datastore(both.path)
        while True:
            for count in range(1, 9):
                store.compact(max_ngram=2, ngrams_per_order=count, progress=False)

    shards = both.config.shards
    states = set()
    once = seconds_in_a_child(lambda: both.compact(max_ngram=2, ngrams_per_order=9, progress=False))
    for i in range(40):
        in_a_child(
            again_and_again, kill_after=once * (0.5 + i / 20 + random.Random(i).random() / 20)
        )
        for form in ("full", "compact"):
            store = Datastore(both.path, form)
            store.verify()
            assert store.config.shards == shards
        states.add(store.config.ngrams.file.name)
    assert len(states) > 2
    store = Datastore(both.path).compact(**QUIET)
    store.verify()


def test_compacting_to_a_path_killed_at_any_moment_leaves_all_or_nothing(both, tmp_path):
    before = content_of(both.path)
    new = tmp_path / "new"
    whole = 0
    duration = seconds_in_a_child(lambda: both.compact(new, **QUIET))
    wanted = content_of(new)
    for i in range(40):
        if new.exists():
            for file in new.iterdir():
                file.unlink()
            new.rmdir()
        in_a_child(lambda: both.compact(new, **QUIET), kill_after=duration * i / 16)
        assert content_of(both.path) == before
        if new.exists():
            whole += 1
            Datastore(new).verify()
            assert content_of(new) == wanted
    assert 0 < whole < 40
    Datastore(both.path).verify()


@pytest.mark.parametrize("limit", [10, 500, 2000])
def test_a_full_disk_is_an_oserror_and_the_datastore_is_as_it_was(both, tmp_path, limit):
    before = content_of(both.path)

    def limited(function: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            function()

        return run

    options = QUIET | {"ngrams_per_order": 100}
    for function in (
        lambda: both.compact(**options),
        lambda: both.compact(tmp_path / "new", **options),
        lambda: both.save_pretrained(tmp_path / "new"),
    ):
        error = in_a_child(limited(function))
        assert isinstance(error, OSError) and "File too large" in str(error)
        assert content_of(both.path) == before
        assert os.listdir(tmp_path) == ["store"]


def test_opening_reads_next_to_nothing_of_a_huge_datastore(tmp_path):
    length = 2**31 - 2
    shards = []
    for i in (1, 2):
        tokens = write_sparse(tmp_path / f"tokens-0000{i}.safetensors", "tokens", "U16", length)
        suffixes = write_sparse(
            tmp_path / f"suffixes-0000{i}.safetensors", "suffixes", "I32", length
        )
        shards.append(ShardEntry(length, 0, tokens, suffixes))
    StoreConfig("f", "t", 300, {}, shards).write(tmp_path)
    before = memory()
    store = Datastore(tmp_path)
    assert store.tokens == 2 * length  # 26 GB
    assert [len(shard.suffixes) for shard in store.shards] == [length, length]
    assert memory() - before < 5e6


@pytest.mark.parametrize("mode", ["mixed", "rest"])
def test_a_text_of_one_token_whose_suffixes_are_all_the_same(tmp_path, mode):
    length = 1_000_000
    files = [
        write_sparse(tmp_path / "tokens-00001.safetensors", "tokens", "U16", length),
        write_sparse(tmp_path / "suffixes-00001.safetensors", "suffixes", "I32", length),
    ]
    StoreConfig("f", "t", 300, {}, [ShardEntry(length, 0, *files)]).write(tmp_path)
    drafter = DatastoreDrafts(Datastore(tmp_path), mode=mode)
    drafter.begin(np.zeros(16, np.int64), 300)
    assert drafter.draft(64).tokens.tolist() == [0] * (10 if mode == "rest" else 30)
    drafter.begin(np.ones(16, np.int64), 300)
    assert len(drafter.draft(64)) == 0


def test_a_separator_everywhere_takes_no_memory(tmp_path):
    length = 20_000_000
    tokens = np.full(length, 2**16 - 1, np.uint16)
    files = [
        write_arrays(tmp_path / "tokens-00001.safetensors", {"tokens": tokens}),
        write_sparse(tmp_path / "suffixes-00001.safetensors", "suffixes", "I32", length),
    ]
    StoreConfig("f", "t", 300, {}, [ShardEntry(length, 0, *files)]).write(tmp_path)
    documents = Datastore(tmp_path).iter_documents()
    before = memory()
    for _ in range(10):
        assert len(next(documents)) == 0
    assert memory() - before < 20e6


def test_the_largest_tokens_are_drafted(tmp_path):
    largest = 2**31 - 2
    documents = [[largest, 5, largest - 1, largest]] * 9
    store = write_store(tmp_path / "store", documents, 2**31 - 1, cuts=(7,))
    for each in (store, store.compact(**QUIET)):
        drafter = DatastoreDrafts(each)
        drafter.begin(np.array([largest, 5]), 2**31 - 1)
        draft = drafter.draft(8)
        draft.checked(2**31 - 1)
        assert draft.tokens[0] == largest - 1 and largest in draft.tokens


def test_a_token_outside_of_the_vocabulary_is_refused(tmp_path):
    for vocab_size, token in ((300, 300), (300, 65_534), (70_000, 70_000), (70_000, 2**32 - 2)):
        folder = tmp_path / f"{vocab_size}-{token}"
        store = write_store(folder, [[1, 2, token, 3]] * 5, vocab_size, cuts=())
        drafter = DatastoreDrafts(store)
        drafter.begin(np.array([1, 2]), vocab_size)
        with pytest.raises(ValueError, match="the datastore is damaged"):
            drafter.draft(8)


def table_of_one(nodes: int, **changes: np.ndarray) -> dict[str, np.ndarray]:
    """The arrays of the n-gram (5,), whose tree is a chain."""
    arrays = {
        "keys": np.array([5], np.uint16),
        "slots": np.array([1, 0], np.uint32),
        "starts": np.array([0, nodes], np.uint32),
        "node_tokens": np.arange(nodes, dtype=np.uint16),
        "node_parents": np.arange(-1, nodes - 1).astype(np.uint8),
        "node_probs": np.zeros(nodes, np.uint8),
    }
    return arrays | changes


def drafted(store: Datastore, budget: int):
    drafter = DatastoreDrafts(store)
    drafter.begin(np.array([5]), 300)
    draft = drafter.draft(budget)
    draft.checked(300)
    return draft


@pytest.mark.parametrize("slots", [[1, 0], [0, 1], [1]])
def test_a_chain_as_long_as_a_tree_can_be(tmp_path, slots):
    arrays = table_of_one(255, slots=np.array(slots, np.uint32))
    store = write_table(tmp_path / "store", arrays, [1])
    lengths = {budget: len(drafted(store, budget)) for budget in (1, 64, 254, 255, 256, 100_000)}
    assert lengths == {1: 1, 64: 64, 254: 254, 255: 255, 256: 255, 100_000: 255} or not any(
        lengths.values()
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"starts": np.array([0, 4], np.uint32)},
        {"starts": np.array([2, 1], np.uint32)},
        {"starts": np.array([2**32 - 1, 2**32 - 1], np.uint32)},
        {"slots": np.array([2, 2], np.uint32)},
        {"slots": np.array([2**32 - 1, 2**32 - 1], np.uint32)},
        {"node_tokens": np.array([300, 1, 2], np.uint16)},
        {"node_tokens": np.array([65_535, 1, 2], np.uint16)},
        {"node_parents": np.array([0, 0, 1], np.uint8)},
        {"node_parents": np.array([255, 1, 1], np.uint8)},
        {"node_parents": np.array([255, 254, 1], np.uint8)},
        {"node_parents": np.array([255, 0, 0], np.uint8), "node_tokens": np.zeros(3, np.uint16)},
        {"node_parents": np.full(3, 255, np.uint8), "node_tokens": np.zeros(3, np.uint16)},
    ],
)
def test_a_damaged_tree_is_refused(tmp_path, changes):
    # Whichever of the two slots the n-gram belongs into.
    arrays = table_of_one(3, slots=np.array([1, 1], np.uint32)) | changes
    store = write_table(tmp_path / "store", arrays, [1])
    with pytest.raises(ValueError, match="the datastore is damaged: its n-gram table"):
        drafted(store, 64)


def test_slots_that_are_all_taken_take_no_time(tmp_path):
    count = 1 << 22
    arrays = table_of_one(3, keys=np.array([7], np.uint16), slots=np.ones(count, np.uint32))
    store = write_table(tmp_path / "store", arrays, [1])
    drafted(store, 8)
    start = time.monotonic()
    for _ in range(2000):
        assert len(drafted(store, 8)) == 0
    assert time.monotonic() - start < 10  # Not how fast it is, but that it does not read them all.


# While others write


def test_a_reader_that_another_process_overtakes_opens_what_is_there_by_then(full, monkeypatch):
    full.compact(max_ngram=1, ngrams_per_order=3, progress=False)
    original, overtaken = StoreConfig.read.__func__, []

    def read(cls, folder, *given):
        config = original(cls, folder, *given)
        if not overtaken:  # what it names is deleted before it is opened
            overtaken.append(config)
            monkeypatch.undo()
            full.compact(**QUIET)
        return config

    monkeypatch.setattr(StoreConfig, "read", classmethod(read))
    reader = Datastore(full.path, "compact")
    assert reader.config == StoreConfig.read(full.path) != overtaken[0]
    assert not (full.path / overtaken[0].ngrams.file.name).exists()
    reader.verify()


def test_readers_never_miss_a_file_while_another_process_compacts(full):
    full.compact(max_ngram=1, ngrams_per_order=3, progress=False)

    def compact_again_and_again() -> None:
        while True:
            full.compact(max_ngram=1, ngrams_per_order=3, progress=False)
            full.compact(**QUIET)

    writer = threading.Thread(target=in_a_child, args=[compact_again_and_again, 4])
    writer.start()
    opened = {}
    while writer.is_alive():
        store = Datastore(full.path, "compact")
        opened[store.config.ngrams.file.name] = opened.get(store.config.ngrams.file.name, 0) + 1
    assert len(opened) == 2 and sum(opened.values()) > 200


def test_shards_that_are_open_outlive_their_files(full):
    reader, wanted = Datastore(full.path), drafts_of(full)
    for file in full.config.files():
        (full.path / file.name).unlink()
    assert drafts_of(reader) == wanted


def test_who_is_overtaken_later_is_told_to_open_it_again(full, tmp_path):
    reader = full.compact(max_ngram=1, ngrams_per_order=3, progress=False)
    full.compact(**QUIET)
    for use in (reader.verify, lambda: reader.save_pretrained(tmp_path / "copy")):
        with pytest.raises(DatastoreError, match=r"changed by another process .* open it again"):
            use()
    assert os.listdir(tmp_path) == ["store"]


@pytest.mark.parametrize(
    "name", [".config.json.new", ".ngrams.safetensors.new", "ngrams.safetensors"]
)
def test_compacting_writes_through_no_link(full, tmp_path, name):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (full.path / name).symlink_to(victim)
    compact = full.compact(**QUIET)
    compact.verify()
    assert victim.read_text() == "mine"
    assert set(content_of(full.path)) == {"config.json", *(f.name for f in compact.config.files())}
