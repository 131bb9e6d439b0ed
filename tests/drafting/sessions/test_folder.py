"""What a cache remembers on the disk outlives its process, whatever happens to that."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import struct
import time
import zlib

import numpy as np
import pytest
from full_disk import full_disk
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from hf_refspec import DatastoreError
from hf_refspec.drafting.sessions import log as log_module
from hf_refspec.drafting.sessions.folder import SessionFolder
from hf_refspec.drafting.sessions.memory import Memory


def opened(path, max_tokens: int = 10**6, tokenizer=None) -> Memory:
    return Memory(max_tokens, SessionFolder(path, tokenizer), seal_tokens=40)


def call(number: int) -> tuple[np.ndarray, np.ndarray]:
    """The same for the same number, also in another process."""
    rng = np.random.default_rng(number)
    return rng.integers(0, 50, 1 + number % 7), rng.integers(0, 50, 1 + number % 5)


def remembered(memory: Memory):
    return [(prompt.tolist(), output.tolist()) for prompt, output in memory.sessions()]


def expected(numbers):
    return [(prompt.tolist(), output.tolist()) for prompt, output in map(call, numbers)]


def seen(memory: Memory) -> list[int]:
    """All tokens that a draft can see, separators as -1."""
    tokens = []
    for text in memory.view.segments:
        part = text.tokens.astype(np.int64)
        part[part == text.separator] = -1
        tokens += part.tolist()
    return tokens + memory.view.tail.tokens.tolist()


@pytest.fixture
def kept(tmp_path):
    """A folder with 60 calls in segments and in the log."""
    memory = opened(tmp_path / "cache")
    for i in range(60):
        memory.add(*call(i))
        memory.wait()
    assert memory.view.segments and len(memory.view.tail.tokens)
    memory.close()
    return tmp_path / "cache"


def test_remembers_after_closing(kept):
    memory = opened(kept)
    assert remembered(memory) == expected(range(60))
    assert seen(memory) == [t for p, o in expected(range(60)) for t in [*p, *o, -1]]
    memory.add(*call(60))
    memory.close()
    memory = opened(kept)
    assert remembered(memory) == expected(range(61))
    memory.close()


def test_finds_similar_sessions_after_closing(kept):
    memory, opened_again = Memory(10**6), opened(kept)
    for i in range(60):
        memory.add(*call(i))
    for prompt, _ in map(call, range(60)):
        found, as_before = (each.similar_outputs(prompt, 5) for each in (opened_again, memory))
        assert [output.tolist() for output in found] == [output.tolist() for output in as_before]
    memory.wait()
    opened_again.close()


def test_forgets_on_the_disk(tmp_path):
    memory = opened(tmp_path, max_tokens=100)
    for i in range(200):
        memory.add(*call(i))
        if i % 20 == 0:
            memory.wait()
    before = remembered(memory)
    memory.wait()
    memory.close()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 20_000
    memory = opened(tmp_path, max_tokens=100)
    assert remembered(memory) == before
    memory.clear()
    memory.add(*call(7))
    memory.close()
    memory = opened(tmp_path)
    assert remembered(memory) == expected([7])
    memory.close()


def in_a_process(function, *arguments):
    """Starts a process that writes lines into what is returned."""
    reader, writer = os.pipe()

    def run():
        os.close(reader)
        with open(writer, "w", buffering=1) as lines:
            function(lines, *arguments)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    os.close(writer)
    return process, open(reader)


def keep_adding(lines, path):
    memory = opened(path)
    for number in range(len(memory), 10**6):
        memory.add(*call(number))
        lines.write(f"{number}\n")


def test_killed_at_any_moment(tmp_path):
    random.seed(0)
    path, added = tmp_path / "cache", 0
    for _ in range(20):
        process, lines = in_a_process(keep_adding, path)
        first = lines.readline()
        time.sleep(random.random() * 0.05)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        acknowledged = [line for line in [first, *lines] if line.endswith("\n")]
        lines.close()
        added = int(acknowledged[-1]) + 1
        memory = opened(path)
        numbers = range(len(memory))
        assert len(memory) in (added, added + 1)
        assert remembered(memory) == expected(numbers)
        assert seen(memory) == [t for p, o in expected(numbers) for t in [*p, *o, -1]]
        memory.close()
    assert added > 200


@pytest.fixture
def copies(tmp_path, monkeypatch):
    """Copies of the folder "cache", made whenever something in it was renamed, made or deleted."""
    made = []

    def copying(function):
        def copied(*arguments, **options):
            result = function(*arguments, **options)
            # Read at once: another thread may go on.
            made.append({path.name: path.read_bytes() for path in (tmp_path / "cache").iterdir()})
            return result

        return copied

    with monkeypatch.context() as patched:
        for name in ("replace", "open", "unlink"):
            patched.setattr(os, name, copying(getattr(os, name)))
        yield made


def written_again(path, files: dict[str, bytes]):
    path.mkdir()
    for name, content in files.items():
        (path / name).write_bytes(content)
    return path


def test_stopped_after_each_change_of_the_folder(tmp_path, copies, caplog):
    memory = opened(tmp_path / "cache")
    copies.clear()
    least = []
    for i in range(60):
        memory.add(*call(i))
        memory.wait()
        least += [i] * (len(copies) - len(least))
    memory.close()
    assert len(copies) > 20
    for number, (least_number, files) in enumerate(zip(least, list(copies), strict=False)):
        copy = written_again(tmp_path / f"copy{number}", files)
        memory = opened(copy)
        assert len(memory) >= least_number
        assert remembered(memory) == expected(range(len(memory)))
        memory.close()
        assert_nothing_is_left_over(copy)
    assert not caplog.records


def test_stopped_over_forgetting_all(tmp_path, kept, copies, caplog):
    shutil.copy(next(kept.glob("segment-*")), kept / "segment-00001.safetensors.copy")
    memory = opened(kept)
    for i in range(60, 70):
        memory.add(*call(i))
    copies.clear()
    memory.clear()
    memory.close()
    for number, files in enumerate(list(copies)):
        copy = written_again(tmp_path / f"copy{number}", files)
        memory = opened(copy)
        assert remembered(memory) == expected(range(len(memory)))
        memory.close()
        assert_nothing_is_left_over(copy)
    assert not caplog.records
    assert (kept / "segment-00001.safetensors.copy").exists()  # the user's own


def assert_nothing_is_left_over(path):
    """In a folder that was opened, all is either named in config.json or a log that is needed."""
    config = json.loads((path / "config.json").read_text())
    named = {"config.json", ".lock", *(each["file"]["name"] for each in config["segments"])}
    logs = {each.name for each in path.glob("log-*") if int(each.name[4:]) >= config["first_log"]}
    assert {each.name for each in path.iterdir() if each.suffix != ".copy"} == named | logs


def test_log_cut_at_every_byte(kept, tmp_path, caplog):
    log = next(kept.glob("log-*"))
    content = log.read_bytes()
    counts = []
    for cut in range(len(content)):
        copy = tmp_path / "copy"
        shutil.copytree(kept, copy)
        (copy / log.name).write_bytes(content[:cut])
        memory = opened(copy)
        counts.append(len(memory))
        assert remembered(memory) == expected(range(len(memory)))
        if cut % 9 == 0:
            memory.add(*call(len(memory)))
            memory.wait()
            memory.close()
            memory = opened(copy)
            assert remembered(memory) == expected(range(counts[-1] + 1))
        memory.close()
        shutil.rmtree(copy)
    assert counts == sorted(counts)
    assert counts[-1] == 59
    assert not caplog.records


def test_other_files_cut(kept, tmp_path):
    for file in [*kept.glob("segment-*"), kept / "config.json"]:
        content = file.read_bytes()
        for cut in range(0, len(content) - 1, max(1, len(content) // 20)):
            file.write_bytes(content[:cut])
            with pytest.raises(DatastoreError, match="damaged"):
                opened(kept)
        file.write_bytes(content[:-9] + b"?" + content[-8:])
        with pytest.raises(DatastoreError, match="damaged"):
            opened(kept)
        file.unlink()
        with pytest.raises(DatastoreError, match=r"missing|not a retrieval cache"):
            opened(kept)
        file.write_bytes(content)
    memory = opened(kept)
    assert len(memory) == 60
    memory.close()


@pytest.mark.parametrize(
    "change",
    [
        {"format": "something else"},
        {"format_version": 3},
        {"segments": None},
        {"segments": [{}]},
        {"first_log": -1},
        {"first_log": True},
        {"first_log": 10**12},
        {"last_segment": "7"},
        {"last_segment": 0},
        {"retired": ["../victim"]},
        {"retired": [".lock"]},
        {"retired": ["log-99999"]},
    ],
)
def test_a_config_that_is_wrong(kept, change):
    config = json.loads((kept / "config.json").read_text())
    (kept / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(DatastoreError, match=r"config.json"):
        opened(kept)


def test_a_segment_outside_of_the_folder(kept):
    config = json.loads((kept / "config.json").read_text())
    config["segments"][0]["file"]["name"] = "../cache/" + config["segments"][0]["file"]["name"]
    (kept / "config.json").write_text(json.dumps(config))
    with pytest.raises(DatastoreError, match="not the name of a segment"):
        opened(kept)


def test_a_folder_with_something_else(tmp_path):
    (tmp_path / "thesis.txt").write_text("dear to somebody")
    with pytest.raises(DatastoreError, match=r"no config.json, but 'thesis.txt'"):
        opened(tmp_path)
    assert (tmp_path / "thesis.txt").exists()
    (tmp_path / "\x1b[31mthesis").touch()
    with pytest.raises(DatastoreError) as raised:
        opened(tmp_path)
    assert "\x1b" not in str(raised.value)
    with pytest.raises(DatastoreError, match=r"thesis.txt is a file"):
        opened(tmp_path / "thesis.txt")


def test_open_only_once(tmp_path):
    memory = opened(tmp_path)
    with pytest.raises(DatastoreError, match="is open in another process"):
        opened(tmp_path)
    process, lines = in_a_process(try_to_open, tmp_path)
    assert f"{tmp_path} is open in another process" in lines.read()
    process.join()
    lines.close()
    memory.close()
    opened(tmp_path).close()


def try_to_open(lines, path):
    try:
        opened(path)
    except DatastoreError as error:
        lines.write(str(error))


def test_another_tokenizer(tmp_path, tokenizer):
    other = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    )
    opened(tmp_path).close()
    opened(tmp_path, tokenizer=tokenizer).close()
    opened(tmp_path).close()  # remembers whose it is
    fingerprint = json.loads((tmp_path / "config.json").read_text())["fingerprint"]
    both = f"another tokenizer.*{fingerprint}, not .* with [0-9a-f]+"
    with pytest.raises(DatastoreError, match=both):
        opened(tmp_path, tokenizer=other)
    opened(tmp_path, tokenizer=tokenizer).close()


def test_a_full_disk(tmp_path, caplog):
    memory = opened(tmp_path)
    memory.add(*call(0))
    memory.close()
    with full_disk():
        memory = Memory(10**6, SessionFolder(tmp_path, None))
        assert remembered(memory) == expected([0])
        for number in range(1, 6):
            memory.add(*call(number))
    assert remembered(memory) == expected(range(6))
    (record,) = caplog.records
    assert f"{tmp_path / 'log-00002'}'; until that is mended" in record.getMessage()
    memory.add(*call(6))
    memory.close()
    memory = opened(tmp_path)
    assert remembered(memory) == expected([0, 6])
    memory.close()


def test_a_disk_that_is_full_while_segments_are_made(tmp_path):
    memory = opened(tmp_path)
    with full_disk():
        for number in range(30):
            memory.add(*call(number))
            memory.wait()
    assert remembered(memory) == expected(range(30))
    assert len(list(tmp_path.glob("log-*"))) == 1  # each attempt goes on with it
    for number in range(30, 60):
        memory.add(*call(number))
        memory.wait()
    memory.close()
    memory = opened(tmp_path)
    assert remembered(memory) == expected(range(60))  # the segments have all
    memory.close()


def test_forgetting_all_on_a_full_disk(tmp_path):
    memory = opened(tmp_path)
    with full_disk(1000):
        memory.add(np.arange(40), np.arange(400))  # its log is begun, and empty
        memory.wait()
        memory.clear()
    memory.add(*call(1))
    memory.close()
    memory = opened(tmp_path)
    assert remembered(memory) == expected([1])
    memory.close()


def test_no_cache_is_made_on_a_full_disk(tmp_path):
    path = tmp_path / "cache"
    with full_disk(), pytest.raises(OSError, match=f"{path}/config.json"):
        opened(path)
    opened(path).close()


def test_a_tokenizer_is_noted_once_there_is_room(kept, tokenizer):
    with full_disk():
        memory = opened(kept, tokenizer=tokenizer)
        memory.add(*call(60))
    assert json.loads((kept / "config.json").read_text())["fingerprint"] is None
    assert len(memory) == 61
    memory.close()
    opened(kept, tokenizer=tokenizer).close()
    assert json.loads((kept / "config.json").read_text())["fingerprint"] is not None


def snapshot(path):
    return {
        each.name: (each.read_bytes(), each.stat().st_mtime_ns, each.stat().st_ino)
        for each in path.iterdir()
    }


def test_a_folder_of_an_older_version_goes_on(kept, caplog):
    config = json.loads((kept / "config.json").read_text()) | {"format_version": 1}
    del config["last_segment"], config["retired"]
    (kept / "config.json").write_text(json.dumps(config))
    log = next(kept.glob("log-*"))
    calls, _ = log_module.read_log(log)
    content = b""
    for prompt, output in calls:
        rest = struct.pack("<II", len(prompt), len(output)), prompt.tobytes() + output.tobytes()
        content += rest[0] + struct.pack("<I", zlib.crc32(b"".join(rest))) + rest[1]
    log.write_bytes(content)
    with full_disk():  # older versions would cut off what is written from now on
        memory = opened(kept)
        assert remembered(memory) == expected(range(60))
        memory.add(*call(99))
        memory.close()
    assert json.loads((kept / "config.json").read_text())["format_version"] == 1
    assert "config.json cannot be written" in caplog.text
    caplog.clear()
    memory = opened(kept)
    assert json.loads((kept / "config.json").read_text())["format_version"] == 2
    for number in range(60, 80):
        memory.add(*call(number))
        memory.wait()
    memory.close()
    memory = opened(kept)
    assert remembered(memory) == expected(range(80))
    memory.close()
    assert not caplog.records


def test_opening_writes_nothing(kept):
    before = snapshot(kept)
    memory = opened(kept)
    assert snapshot(kept) == before
    memory.close()
    assert snapshot(kept) == before


def test_what_was_found_is_never_changed(kept, tmp_path):
    """Others may have the same files under names of their own, as in a backup with hard links."""
    backup = tmp_path / "backup"
    backup.mkdir()
    for each in kept.iterdir():
        os.link(each, backup / each.name)
    before = snapshot(backup)
    memory = opened(kept)
    for number in range(60, 90):
        memory.add(*call(number))
        memory.wait()
    memory.close()
    assert snapshot(backup) == before


OURS = [
    "config.json",
    ".config.json.new",
    ".lock",
    "log-00002",
    "log-00099",
    "segment-00001.safetensors",
    "segment-00099.safetensors",
    ".segment-00099.safetensors.new",
]


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("is_new", [True, False])
def test_links_are_neither_followed_nor_deleted(kept, tmp_path, name, is_new):
    if is_new:
        shutil.rmtree(kept)
        kept.mkdir()
    for target in ("victim", "nothing", "cache", name):
        (tmp_path / "victim").write_bytes(b"dear to somebody")
        (kept / name).unlink(missing_ok=True)
        os.symlink(f"../{target}" if target != name else name, kept / name)
        with pytest.raises(DatastoreError, match=re.escape(f"{kept / name} is not a file")):
            opened(kept)
        assert (tmp_path / "victim").read_bytes() == b"dear to somebody"
        assert not (tmp_path / "nothing").exists()
        assert (kept / name).is_symlink()


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_pipes_and_folders_are_not_waited_for(kept, name, make):
    (kept / name).unlink(missing_ok=True)
    make(kept / name)
    with pytest.raises(DatastoreError, match=re.escape(f"{kept / name} is not a file")):
        opened(kept)


def test_a_sparse_log(kept):
    os.truncate(next(kept.glob("log-*")), 200 * 2**30)
    with pytest.raises(DatastoreError, match="no log has more than"):
        opened(kept)


@pytest.mark.parametrize("name", ["log-99999999999", "log-999999999999", "log-02000"])
def test_logs_with_numbers_far_away(kept, name):
    (kept / name).touch()
    with pytest.raises(DatastoreError, match=re.escape(f"{kept / name} is not ")):
        opened(kept)
    (kept / name).unlink()
    opened(kept).close()


def test_a_record_with_an_impossible_id(kept, caplog):
    ids = np.array([5, 2**31 - 1], dtype="<i4").tobytes()
    head = struct.pack("<II", 1, 1)
    with open(next(kept.glob("log-*")), "ab") as log:
        log.write(
            b"\xf5hf\xf6" + head + struct.pack("<II", zlib.crc32(head), zlib.crc32(ids)) + ids
        )
    memory = opened(kept)
    assert remembered(memory) == expected(range(60))
    assert memory.view.largest_id < 50
    assert "28 bytes of it cannot be read" in caplog.text
    memory.close()


def test_a_flipped_bit_costs_one_call_and_the_log_is_kept(tmp_path, caplog):
    path = tmp_path / "cache"
    memory = Memory(10**6, SessionFolder(path, None))
    for number in range(220):
        memory.add(*call(number))
    memory.close()
    log = path / "log-00001"
    content = bytearray(log.read_bytes())
    content[9] ^= 4
    log.write_bytes(content)
    for number in range(220, 230):  # the log is in place until its calls are in a segment
        memory = opened(path)
        assert remembered(memory) == expected(range(1, number))
        assert f"{log} is damaged" in caplog.text
        memory._seal_at = 10**6
        memory.add(*call(number))
        memory.close()
        assert log.read_bytes() == content
    caplog.clear()
    memory = opened(path)
    caplog.clear()
    memory.add(*call(230))
    memory.wait()
    memory.close()
    memory = opened(path)
    assert memory.view.segments and remembered(memory) == expected(range(1, 231))
    assert not caplog.records
    memory.close()
    assert (path / "log-00001.damaged").read_bytes() == content
    assert not log.exists()
    memory = opened(path)
    memory.clear()
    memory.close()
    assert not list(path.glob("*log*"))


def test_logs_that_config_says_are_in_segments(kept, caplog):
    """Those that it has retired are deleted, all others are taken up again."""
    config = json.loads((kept / "config.json").read_text())
    (kept / "config.json").write_text(json.dumps(config | {"first_log": 77}))
    for _ in range(2):
        memory = opened(kept)
        assert remembered(memory) == expected(range(60))
        memory.close()
        assert caplog.text.count("it has not retired them") == 1
    memory = opened(kept)
    for number in range(60, 100):
        memory.add(*call(number))
        memory.wait()
    memory.close()
    memory = opened(kept)
    assert remembered(memory) == expected(range(100))
    memory.close()
    assert len(caplog.records) == 1


def test_a_log_that_is_missing(tmp_path, caplog):
    for number in range(3):
        memory = opened(tmp_path)
        memory.add(*call(number))
        memory.close()
    (tmp_path / "log-00002").unlink()
    memory = opened(tmp_path)
    assert remembered(memory) == expected([0, 2])
    assert "1 logs before log-00004 are missing" in caplog.text
    memory.close()


def test_a_segment_that_config_does_not_name(kept, caplog):
    config = json.loads((kept / "config.json").read_text())
    dropped = config["segments"].pop(0)["file"]["name"]
    (kept / "config.json").write_text(json.dumps(config))
    content = (kept / dropped).read_bytes()
    memory = opened(kept)
    assert f"{kept / dropped} is not named in config.json" in caplog.text
    for number in range(60, 100):
        memory.add(*call(number))
        memory.wait()
    memory.close()
    assert (kept / dropped).read_bytes() == content


def test_full_logs_go_on_in_another(tmp_path, monkeypatch):
    monkeypatch.setattr(log_module, "_FULL", 100)
    memory = Memory(10**6, SessionFolder(tmp_path, None))
    for number in range(50):
        memory.add(*call(number))
    memory.close()
    assert len(list(tmp_path.glob("log-*"))) > 5
    memory = opened(tmp_path)
    assert remembered(memory) == expected(range(50))
    memory.close()


def test_calls_of_others_that_are_too_long(kept):
    memory = opened(kept, max_tokens=5)
    assert all(len(prompt) + len(output) <= 5 for prompt, output in memory.sessions())
    assert len(memory)
    memory.close()


def change_ends(arrays):
    arrays["ends"][0] = arrays["ends"][1]


def end_early(arrays):
    arrays["ends"][-1] -= 1


def end_far_away(arrays):
    arrays["ends"][1] = 2**31 - 1


def have_long_prompts(arrays):
    arrays["prompt_lengths"][:] = 2**31 - 1


def have_prompts_of_less_than_nothing(arrays):
    arrays["prompt_lengths"][2] = -1


def leave_the_vocabulary(arrays):
    arrays["tokens"][0] = 65_534


def have_another_separator(arrays):
    arrays["tokens"][arrays["ends"][0]] = 65_534


def lack_a_separator(arrays):
    arrays["tokens"][arrays["ends"][0]] = 1


def point_before_the_text(arrays):
    arrays["suffixes"][3] = -1


def point_behind_the_text(arrays):
    arrays["suffixes"][3] = len(arrays["tokens"])


def repeat_a_suffix(arrays):
    arrays["suffixes"][3] = arrays["suffixes"][4]


@pytest.mark.parametrize(
    "change",
    [
        change_ends,
        end_early,
        end_far_away,
        have_long_prompts,
        have_prompts_of_less_than_nothing,
        leave_the_vocabulary,
        have_another_separator,
        lack_a_separator,
        point_before_the_text,
        point_behind_the_text,
        repeat_a_suffix,
    ],
)
def test_a_segment_with_other_numbers_and_their_checksum(kept, change):
    config = json.loads((kept / "config.json").read_text())
    entry = config["segments"][0]["file"]
    path = kept / entry["name"]
    arrays = {name: array.copy() for name, array in load_file(path).items()}
    change(arrays)
    path.unlink()
    save_file(arrays, path)
    entry["sha256"], entry["size"] = (
        hashlib.sha256(path.read_bytes()).hexdigest(),
        path.stat().st_size,
    )
    (kept / "config.json").write_text(json.dumps(config))
    with pytest.raises(DatastoreError, match=re.escape(f"{path} is damaged: its ")):
        opened(kept)


@pytest.mark.parametrize(
    "change",
    [
        {"documents": 0},
        {"tokens": 0},
        {"vocab_size": 2**24 + 2},
        {"tokens": 2**31 - 1},
        {"documents": 2**31 - 1},
        {"tokens": 2**31},
    ],
)
def test_a_segment_of_an_impossible_size(kept, change):
    config = json.loads((kept / "config.json").read_text())
    config["segments"][0] |= change
    (kept / "config.json").write_text(json.dumps(config))
    with pytest.raises(DatastoreError, match=re.escape(f"{kept / 'config.json'} is damaged")):
        opened(kept)
