"""What a cache remembers on the disk outlives its process, whatever happens to that."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import random
import shutil
import signal
import time

import numpy as np
import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from hf_refspec import DatastoreError
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


def test_stopped_before_and_after_each_change_of_the_folder(tmp_path, monkeypatch):
    """The folder is copied whenever something in it was renamed, made or deleted."""
    copies = []

    def copying(function):
        def copied(*arguments, **options):
            result = function(*arguments, **options)
            copies.append((len(memory), tmp_path / f"copy{len(copies)}"))
            shutil.copytree(path, copies[-1][1])
            return result

        return copied

    path = tmp_path / "cache"
    memory = opened(path)
    with monkeypatch.context() as patched:
        for name in ("replace", "open", "unlink"):
            patched.setattr(os, name, copying(getattr(os, name)))
        for i in range(60):
            memory.add(*call(i))
            memory.wait()
    memory.close()
    assert len(copies) > 20
    for least, copy in copies:
        memory = opened(copy)
        assert len(memory) >= least
        assert remembered(memory) == expected(range(len(memory)))
        memory.close()


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
    assert "no whole record" in caplog.text


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
        {"format_version": 2},
        {"segments": None},
        {"segments": [{}]},
        {"first_log": -1},
        {"first_log": True},
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
    with pytest.raises(DatastoreError, match=r"no config.json, but thesis.txt"):
        opened(tmp_path)
    assert (tmp_path / "thesis.txt").exists()


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


def test_a_full_disk(tmp_path, monkeypatch, caplog):
    def full(*_):
        raise OSError("no space left")

    memory = opened(tmp_path)
    memory.add(*call(0))
    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
        patched.setattr(memory._folder, "append", full)
        memory.add(*call(1))
    assert remembered(memory) == expected([0, 1])
    assert "no space left" in caplog.text
    memory.close()
    memory = opened(tmp_path)
    assert remembered(memory) == expected([0])
    memory.close()
